"""Circuit breaker: no further requests to a server that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum


class Admission(Enum):
    """What a request may do."""

    SEND = "send, with retries"
    PROBE = "send once, to see whether the server has recovered"
    REFUSED = "not send"


class CircuitBreaker:
    """Counts requests that failed in a row, and refuses further ones after ``limit`` (None: never).

    After ``cool_down_s`` one request is admitted as a probe: if it succeeds, all are admitted
    again; if it fails, the time starts anew.
    """

    def __init__(
        self, limit: int | None, cool_down_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._cool_down_s, self._clock = limit, cool_down_s, clock
        self._lock = threading.Lock()
        self._failures, self._probing, self._probe_at = 0, False, 0.0
        self._last = ""

    def admit(self) -> Admission:
        """Decide about a request; ``succeeded`` or ``failed`` must follow unless it is refused."""
        with self._lock:
            if self._limit is None or self._failures < self._limit:
                return Admission.SEND
            if self._probing or self._clock() < self._probe_at:
                return Admission.REFUSED
            self._probing = True
            return Admission.PROBE

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._probing = 0, False

    def failed(self, why: str) -> None:
        """Note a request that failed after its retries."""
        with self._lock:
            self._failures += 1
            self._last = why
            self._probing, self._probe_at = False, self._clock() + self._cool_down_s

    def describe(self) -> str:
        with self._lock:
            return (
                f"no request is sent, because the last {self._failures} failed "
                f"(reward.kwargs.max_failures); the last one: {self._last}"
            )
