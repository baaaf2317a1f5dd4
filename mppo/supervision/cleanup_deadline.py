"""A time limit for a failed rank to stop what it runs and to destroy its process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable

CLEANUP_S = 20.0
"""Less than the 30 s after which launchers send SIGKILL."""


class CleanupDeadline:
    """A context around everything that a failed rank has to clean up.

    Args:
        limit_s: seconds for the clean-up.
    """

    def __init__(self, limit_s: float = CLEANUP_S) -> None:
        self.limit_s = limit_s
        self._left = threading.Event()

    def __enter__(self) -> CleanupDeadline:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def begin(self, on_timeout: Callable[[], None]) -> None:
        """Start the clock.

        Args:
            on_timeout: called in a thread if this context is not left within the limit.
        """

        def wait() -> None:
            if not self._left.wait(self.limit_s):
                on_timeout()

        threading.Thread(target=wait, name="clean-up deadline", daemon=True).start()
