"""Requests on their way to servers while this rank's main thread does something else."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.dispatch import DispatchResult, dispatch
from mppo.rollout.sglang.straggler_abort import StragglerAbort
from mppo.supervision import stop_request

_LOOK_S = 0.2
_ABORT_S = 5.0
"""What is aborted is answered within this time, or its server hangs."""


class InFlightRequests:
    """Jobs dispatched from a thread of their own, which calls nothing collective.

    Args:
        apis: the servers that are up.
        jobs, call, in_flight: see ``dispatch``.
        tail: ends what runs once enough is answered; None: nothing ends early.
    """

    def __init__(
        self,
        apis: Callable[[], Mapping[int, SGLangApi]],
        jobs: Sequence[Any],
        call: Callable[[SGLangApi, Any], Any],
        in_flight: int,
        tail: StragglerAbort | None = None,
    ) -> None:
        self._tail = tail
        self._outcome: DispatchResult[Any] = DispatchResult()
        self._error: Exception | None = None
        self.seconds = 0.0

        def work() -> None:
            start = time.perf_counter()
            try:
                with nullcontext() if tail is None else tail.watching(apis):
                    self._outcome = dispatch(apis(), jobs, call, in_flight)
            except Exception as error:  # raised where the main thread waits
                self._error = error
            self.seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=work, name="rollout", daemon=True)
        self._thread.start()

    def wait(self) -> DispatchResult[Any]:
        """What became of the jobs, once all have ended.

        Raises:
            Abandoned: the step is to be left; jobs under way are left alone.
            Exception: what ``call`` raised.
        """
        while self._thread.is_alive():
            stop_request.raise_if_due()
            self._thread.join(_LOOK_S)
        return self._ended()

    def land(self) -> DispatchResult[Any]:
        """As ``wait``, in a step that is not left any more: of a run that is asked to stop the jobs
        are aborted, for there is no time."""
        deadline = math.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            if stop_request.is_requested() and self._tail is not None and math.isinf(deadline):
                self._tail.end()
                deadline = time.monotonic() + _ABORT_S
            self._thread.join(_LOOK_S)
        return self._ended()

    def drop(self) -> None:
        """Abort what runs; nobody wants it."""
        if self._tail is not None:
            self._tail.end()
            self._thread.join(_ABORT_S)

    def _ended(self) -> DispatchResult[Any]:
        if self._error is not None:
            raise self._error
        return self._outcome
