"""Requests that run in a thread of their own while this rank's main thread continues."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.dispatch import DispatchResult, dispatch
from mppo.rollout.sglang.straggler_abort import StragglerAbort
from mppo.supervision import stop_request
from mppo.supervision.phase import tick

_POLL_S = 0.2
_ABORT_S = 5.0
"""An aborted request is answered within this time, or its server hangs."""
_OBSERVE_S = 5.0
"""Seconds between two looks at a server's progress, at most."""


class InFlightRequests:
    """Jobs dispatched from one thread, which makes no collective call; for ``jobs``, ``call`` and
    ``max_in_flight`` see ``dispatch``.

    ``stragglers`` aborts running requests once enough prompts are answered; ``seconds`` is the
    duration of all jobs, once they have ended.
    """

    def __init__(
        self,
        apis: Callable[[], Mapping[int, SGLangApi]],
        jobs: Sequence[Any],
        call: Callable[[SGLangApi, Any], Any],
        max_in_flight: int,
        stragglers: StragglerAbort | None = None,
    ) -> None:
        self._stragglers = stragglers
        self._result: DispatchResult[int, Any] = DispatchResult()
        self._error: Exception | None = None
        self.seconds = 0.0

        def counted(api: SGLangApi, job: Any) -> Any:
            result = call(api, job)
            tick()
            return result

        def work() -> None:
            start = time.perf_counter()
            watching = nullcontext() if stragglers is None else stragglers.watching(apis)
            try:
                with watching, _observing(apis):
                    self._result = dispatch(apis(), jobs, counted, max_in_flight)
            except Exception as error:  # the main thread raises it
                self._error = error
            self.seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=work, name="rollout", daemon=True)
        self._thread.start()

    def wait(self) -> DispatchResult[int, Any]:
        """Wait until all jobs have ended.

        Raises:
            StepInterrupted: a stop was requested; running jobs continue.
            Exception: raised by ``call``.
        """
        while self._thread.is_alive():
            stop_request.raise_if_due()
            self._thread.join(_POLL_S)
        return self._ended()

    def join(self) -> DispatchResult[int, Any]:
        """As ``wait``, but never raise ``StepInterrupted``: if a stop was requested, abort."""
        deadline = math.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            stopping = stop_request.is_requested() and math.isinf(deadline)
            if stopping and self._stragglers is not None:
                self._stragglers.abort()
                deadline = time.monotonic() + _ABORT_S
            self._thread.join(_POLL_S)
        return self._ended()

    def abort(self) -> None:
        """Abort running requests; their responses are lost."""
        if self._stragglers is not None:
            self._stragglers.abort()
            self._thread.join(_ABORT_S)

    def _ended(self) -> DispatchResult[int, Any]:
        if self._error is not None:
            raise self._error
        return self._result


@contextmanager
def _observing(apis: Callable[[], Mapping[int, SGLangApi]]) -> Iterator[None]:
    """Observe the servers' progress, which extends the limits of requests and heartbeat."""
    over = threading.Event()
    limits_s = [api.client.timeout_s for api in apis().values()]
    interval_s = min([_OBSERVE_S, *(limit_s / 4 for limit_s in limits_s)])

    def observe() -> None:
        while not over.wait(interval_s):
            for api in apis().values():
                if api.observe_progress():
                    tick()

    observer = threading.Thread(target=observe, name="rollout progress", daemon=True)
    observer.start()
    try:
        yield
    finally:
        over.set()
