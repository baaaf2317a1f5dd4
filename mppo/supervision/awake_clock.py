"""A clock that does not count the time during which its process is stopped."""

from __future__ import annotations

import threading
import time

_LARGEST_GAP = 3
"""Ticks; after a longer gap between two ticks this process was stopped in between."""


class AwakeClock:
    """A clock that pauses while this process is stopped (SIGSTOP).

    With a plain clock, a continued process would mistake its own pause for the others' silence.

    Args:
        tick_s: ``now`` is called at least this often while the process runs.
    """

    def __init__(self, tick_s: float) -> None:
        self._gap_s = _LARGEST_GAP * tick_s
        self._lock = threading.Lock()
        self._seconds, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds since the clock was made."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._last, self._gap_s)
            self._last = now
            return self._seconds
