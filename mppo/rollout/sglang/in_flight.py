"""Requests that run in threads of their own while this rank's main thread continues.

Jobs run on several servers at once, and those of a lost server go to the others. The slowest
requests are aborted once enough prompts are answered.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mppo.rollout.answered import AnsweredPrompts
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import ServerLost
from mppo.supervision import stop_request
from mppo.supervision.phase import tick

_POLL_S = 0.2
_ABORT_S = 5.0
"""An aborted request is answered within this time, or its server hangs."""
_OBSERVE_S = 5.0
"""Seconds between two looks at a server's progress, at most."""
_ABORT_POLL_S = 0.05

Job = TypeVar("Job")
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Server = TypeVar("Server")


@dataclass
class DispatchResult(Generic[Name, Result]):
    """Results by job index, only of jobs whose answer arrived completely; lost servers, and why."""

    results: dict[int, Result] = field(default_factory=dict)
    lost: dict[Name, str] = field(default_factory=dict)


def dispatch(
    servers: Mapping[Name, Server],
    jobs: Sequence[Job],
    call: Callable[[Server, Job], Result],
    max_in_flight: int,
) -> DispatchResult[Name, Result]:
    """Run jobs on servers until all are done or no server is left; jobs for which none was left
    have no result.

    Each server takes the next job, in order, as soon as it has fewer than ``max_in_flight``
    running, which balances the load. A server that loses a job (``call`` raises ``ServerLost``)
    gets no further job; the job goes to another.

    Raises:
        Exception: any other exception of ``call``, after running jobs have ended.
    """
    outcome: DispatchResult[Name, Result] = DispatchResult()
    waiting = deque(range(len(jobs)))
    failures: list[Exception] = []
    lock = threading.Condition()
    running = 0

    def work(name: Name, server: Server) -> None:
        nonlocal running
        while True:
            with lock:
                # a job that runs on another server returns to the queue if that server is lost
                while not waiting and running and not failures and name not in outcome.lost:
                    lock.wait()
                if not waiting or failures or name in outcome.lost:
                    return
                index = waiting.popleft()
                running += 1
            try:
                result = call(server, jobs[index])
            except ServerLost as error:
                with lock:
                    waiting.appendleft(index)
                    outcome.lost.setdefault(name, str(error))
            except Exception as error:
                with lock:
                    failures.append(error)
            else:
                with lock:
                    outcome.results[index] = result
            finally:
                with lock:
                    running -= 1
                    lock.notify_all()

    each = max(1, min(max_in_flight, len(jobs)))
    threads = [
        threading.Thread(target=work, args=item, daemon=True)
        for item in servers.items()
        for _ in range(each)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return outcome


class StragglerAbort:
    """Aborts running requests once enough prompts are answered and somebody waits for them;
    ``reached`` is set then."""

    def __init__(self, answered: AnsweredPrompts) -> None:
        self.answered = answered
        self._is_awaited = threading.Event()
        self.reached = threading.Event()

    def when_enough(self) -> None:
        """Abort as soon as enough prompts are answered; until now none was waited for."""
        self._is_awaited.set()
        self._look()

    def abort(self) -> None:
        """Abort this rank's running requests; safe in any thread."""
        self.reached.set()

    def _look(self) -> None:
        if self._is_awaited.is_set() and self.answered.are_enough:
            self.reached.set()

    @contextmanager
    def watching(self, apis: Callable[[], Mapping[int, SGLangApi]]) -> Iterator[None]:
        """Abort running requests of this rank's servers, those not lost, as soon as ``reached`` is
        set."""
        over = threading.Event()

        def watch() -> None:
            # repeatedly: a request may reach a server just after the server aborted all others
            while not over.wait(_ABORT_POLL_S):
                self._look()  # other ranks may have completed prompts
                for api in apis().values() if self.reached.is_set() else ():
                    try:
                        api.abort_all()
                    except ServerLost:
                        continue  # the request to that server fails too, and is handled there

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


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
