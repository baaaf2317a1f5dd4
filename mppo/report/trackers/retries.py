"""A tracker whose failures end no run: calls that fail are kept, and tried again later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mppo.report.console import SampleRow
from mppo.report.history import Metrics
from mppo.report.trackers.tracker import Tracker
from mppo.safety.foreign_text import quoted

TRIES = 3
"""After as many failures a call is given up: the tracker may refuse what is in it."""
KEPT, LONGEST_PAUSE = 1000, 32
"""Most calls that wait, and most calls that are only kept before the tracker is tried again."""


class RetriedTracker:
    """Passes calls to a tracker, a ``Tracker`` itself, and goes on without it while it fails.

    After a failure the next calls are kept: one, then 2, 4 and so on up to ``LONGEST_PAUSE``, so
    that a server that is away does not hold up each step. Then all are tried in order. ``say``
    prints a line at the first failure, when the tracker works again, and at the end.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._tries = 0
        """Failures of the oldest call that waits."""
        self._in_a_row = self._pause = 0
        self.failures = self.given_up = 0

    def log(self, step: int, metrics: Metrics) -> None:
        self._call(f"step {step}", partial(self._tracker.log, step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._call(f"the samples of step {step}", partial(self._tracker.samples, step, list(rows)))

    def picture(self, step: int, path: Path) -> None:
        self._call(f"the picture {path.name}", partial(self._tracker.picture, step, path))

    def close(self) -> None:
        """Send what is left, once more if it fails, and end."""
        while self._waiting and self._in_a_row < 2 * TRIES:
            self._send()
        self.given_up += len(self._waiting)
        self._waiting.clear()
        try:
            self._tracker.close()
        except Exception as error:
            self.failures += 1
            self._say(f"{self._name}: it cannot be closed ({_reason(error)})")
        if self.failures:
            lost = f"{self.given_up} calls were given up"
            self._say(f"{self._name}: {self.failures} failures in this run, {lost}")

    def _call(self, what: str, call: Callable[[], None]) -> None:
        if len(self._waiting) == KEPT:
            self._give_up()
        self._waiting.append((what, call))
        if self._pause:
            self._pause -= 1
            return
        while self._waiting and not self._pause:
            self._send()

    def _send(self) -> None:
        what, call = self._waiting[0]
        try:
            call()
        except Exception as error:
            self.failures += 1
            self._tries += 1
            if not self._in_a_row:
                why = f"{what} is tried again ({_reason(error)})"
                self._say(f"{self._name}: {why}; the run goes on")
            self._pause = min(2**self._in_a_row, LONGEST_PAUSE)
            self._in_a_row += 1
            if self._tries == TRIES:
                self._give_up()
            return
        if self._in_a_row:
            self._say(f"{self._name}: works again")
        self._waiting.popleft()
        self._tries = self._in_a_row = self._pause = 0

    def _give_up(self) -> None:
        self._waiting.popleft()
        self._tries = 0
        self.given_up += 1


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {quoted(str(error))}"
