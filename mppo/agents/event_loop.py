"""An event loop in a thread of its own, which the main thread asks to run coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from mppo.supervision import stop_request
from mppo.supervision.phase import tick

_T = TypeVar("_T")
_POLL_S = 0.2


class EventLoop:
    """Runs from the first coroutine until ``stop``."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has run a coroutine and was not stopped."""
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, _T], *, may_interrupt: bool = False) -> _T:
        """Run a coroutine to its end; with ``may_interrupt`` a stop of the run that is due cancels
        it, and raises StepInterrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            while not wait([future], timeout=_POLL_S).done:
                tick()  # whatever is awaited has limits of its own
                if may_interrupt:
                    stop_request.raise_if_due()
        finally:
            future.cancel()
        return future.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run = self._loop.run_forever
            self._thread = threading.Thread(target=run, name="agents", daemon=True)
            self._thread.start()
        return self._loop

    def stop(self) -> None:
        """End the thread. Idempotent."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = None
