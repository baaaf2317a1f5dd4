"""A rank that has failed stops what it runs and destroys its process groups, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAY_OUT_S = 20.0
"""Less than the 30 s after which launchers send SIGKILL."""


class CleanupDeadline:
    """Around everything that a failed rank has to leave, so that it is seen to come out.

    Args:
        limit_s: seconds that it may take.
    """

    def __init__(self, limit_s: float = WAY_OUT_S) -> None:
        self.limit_s = limit_s
        self._left = threading.Event()

    def __enter__(self) -> CleanupDeadline:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def begin(self, late: Callable[[], None]) -> None:
        """The time runs from now on; ``late`` is called, in a thread, when it is over."""

        def wait() -> None:
            if not self._left.wait(self.limit_s):
                late()

        threading.Thread(target=wait, name="way out", daemon=True).start()
