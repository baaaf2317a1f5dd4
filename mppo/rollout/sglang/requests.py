"""Requests to the servers: in threads, while the main threads of the ranks continue.

Jobs run on several servers at once, and those of a lost server go to the others of the rank. The
slowest requests are aborted once enough prompts are answered. If no server is left, the ranks
restart theirs and repeat what is missing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.rollout.response_gather import AnsweredPrompts
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.http_client import RequestRefused, ServerLost
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.supervision import stop_request
from mppo.supervision.phase import tick
from mppo.supervision.stop_request import StepInterrupted

ATTEMPTS = 3
_POLL_S = 0.2
_ABORT_S = 5.0
"""An aborted request is answered within this time, or its server hangs."""
_OBSERVE_S = 5.0
"""Seconds between two looks at a server's progress, at most."""
_ABORT_POLL_S = 0.05

Call = Callable[[SGLangApi, Any], Any]


@dataclass
class DispatchResult:
    """Results by job index, only of jobs whose answer arrived completely; lost servers, and why."""

    results: dict[int, Any] = field(default_factory=dict)
    lost: dict[Any, str] = field(default_factory=dict)


def dispatch(
    servers: Mapping[Any, Any],
    jobs: Sequence[Any],
    call: Callable[[Any, Any], Any],
    max_in_flight: int,
) -> DispatchResult:
    """Run jobs on servers until all are done or no server is left; jobs for which none was left
    have no result.

    Each server takes the next job, in order, as soon as it has fewer than ``max_in_flight``
    running, which balances the load. A server that loses a job (``call`` raises ``ServerLost``)
    gets no further job; the job goes to another. Any other exception of ``call`` is raised after
    running jobs have ended.
    """
    outcome = DispatchResult()
    waiting = deque(range(len(jobs)))
    failures: list[Exception] = []
    lock = threading.Condition()
    running = 0

    def work(name: Any, server: Any) -> None:
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


@contextmanager
def _repeating(step: Callable[[], None], interval_s: float, joins: bool) -> Iterator[None]:
    """Run a step again and again in a thread of its own; ``joins``: wait for the last one."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(interval_s):
            step()

    thread = threading.Thread(target=repeat, name="rollout watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if joins:
            thread.join()


class StragglerAbort:
    """Sets ``reached``, at which running requests are aborted, once enough prompts are answered and
    somebody waits for them."""

    def __init__(self, answered: AnsweredPrompts) -> None:
        self.answered = answered
        self._is_awaited = threading.Event()
        self.reached = threading.Event()

    def when_enough(self) -> None:
        """Abort as soon as enough prompts are answered; until now none was waited for."""
        self._is_awaited.set()
        self.look()

    def look(self) -> None:
        if self._is_awaited.is_set() and self.answered.are_enough:
            self.reached.set()


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
        call: Call,
        max_in_flight: int,
        stragglers: StragglerAbort | None = None,
    ) -> None:
        self._apis, self._stragglers = apis, stragglers
        self._result = DispatchResult()
        self._error: Exception | None = None
        self.seconds = 0.0

        def counted(api: SGLangApi, job: Any) -> Any:
            result = call(api, job)
            tick()
            return result

        def work() -> None:
            start = time.perf_counter()
            limits_s = [api.client.timeout_s for api in apis().values()]
            look_s = min([_OBSERVE_S, *(limit_s / 4 for limit_s in limits_s)])
            watching = nullcontext()
            if stragglers is not None:
                watching = _repeating(self._abort_stragglers, _ABORT_POLL_S, joins=True)
            try:
                with watching, _repeating(self._observe_progress, look_s, joins=False):
                    self._result = dispatch(apis(), jobs, counted, max_in_flight)
            except Exception as error:  # the main thread raises it
                self._error = error
            self.seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=work, name="rollout", daemon=True)
        self._thread.start()

    def _abort_stragglers(self) -> None:
        """Abort, again and again: a request may reach a server just after it aborted all others."""
        assert self._stragglers is not None
        self._stragglers.look()  # other ranks may have completed prompts
        for api in self._apis().values() if self._stragglers.reached.is_set() else ():
            with suppress(ServerLost):  # the request to that server fails too, and is handled there
                api.abort_all()

    def _observe_progress(self) -> None:
        """The servers' progress extends the limits of requests and heartbeat."""
        for api in self._apis().values():
            if api.observe_progress():
                tick()

    def wait(self) -> DispatchResult:
        """Wait until all jobs have ended; StepInterrupted if a stop was requested (running jobs
        continue), and what ``call`` raised."""
        while self._thread.is_alive():
            stop_request.raise_if_due()
            self._thread.join(_POLL_S)
        return self._ended()

    def join(self) -> DispatchResult:
        """As ``wait``, but never raise ``StepInterrupted``: if a stop was requested, abort."""
        deadline = math.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            stopping = stop_request.is_requested() and math.isinf(deadline)
            if stopping and self._stragglers is not None:
                self._stragglers.reached.set()
                deadline = time.monotonic() + _ABORT_S
            self._thread.join(_POLL_S)
        return self._ended()

    def abort(self) -> None:
        """Abort running requests; their responses are lost."""
        if self._stragglers is not None:
            self._stragglers.reached.set()
            self._thread.join(_ABORT_S)

    def _ended(self) -> DispatchResult:
        if self._error is not None:
            raise self._error
        return self._result


class Requests:
    """Sends jobs, each rank to its own servers. Call ``restore`` (collective), which makes every
    server ready and returns the version of the weights, before ``launch`` or ``collect``."""

    def __init__(self, fleet: Fleet, restore: Callable[[], int], rank: int, world: int) -> None:
        self.fleet, self.restore = fleet, restore
        self.rank, self.world = rank, world

    def launch(
        self,
        jobs: Sequence[Any],
        call: Call,
        max_in_flight: int,
        stragglers: StragglerAbort | None = None,
    ) -> InFlightRequests:
        return InFlightRequests(lambda: self.fleet.apis, jobs, call, max_in_flight, stragglers)

    def join(self, requests: InFlightRequests) -> dict[int, Any]:
        """Wait for requests; return the results there are, by job index. Collective; RuntimeError
        on every rank if a request of some rank failed."""
        return self._result(requests, may_interrupt=False).results

    def collect(
        self,
        jobs: Sequence[Any],
        call: Call,
        max_in_flight: int,
        stragglers: StragglerAbort | None = None,
        requests: InFlightRequests | None = None,
        may_interrupt: bool = True,
    ) -> dict[int, Any]:
        """Results of all jobs, by index; lost servers are restarted. Collective.

        ``requests``: the jobs, if they are in flight already. RuntimeError on every rank if a
        request failed or no server was left; StepInterrupted if a stop ``may_interrupt``.
        """
        results: dict[int, Any] = {}
        lost: dict[int, str] = {}
        left = len(jobs)
        for _ in range(ATTEMPTS):
            waiting = [index for index in range(len(jobs)) if index not in results]
            if requests is None:
                requests = self.launch([jobs[i] for i in waiting], call, max_in_flight, stragglers)
            outcome, requests = self._result(requests, may_interrupt), None
            results.update({waiting[place]: r for place, r in outcome.results.items()})
            lost = outcome.lost or lost
            left = len(jobs) - len(results)
            # every rank repeats as long as one has requests left: ``restore`` is collective
            if not any(all_gather_objects(left, self.world)):
                return results
            self.restore()
        why = (
            f"rank {self.rank}: {left} of {len(jobs)} requests were not served in {ATTEMPTS} "
            f"attempts: {lost}{self.fleet.last_output()}"
        )
        raise_on_any_rank(why if left else None, self.world)
        raise AssertionError("some rank had requests left")

    def _result(self, requests: InFlightRequests, may_interrupt: bool) -> DispatchResult:
        result = DispatchResult()
        error = None
        try:
            with suppress(StepInterrupted):  # the sync below raises it on every rank
                result = requests.wait() if may_interrupt else requests.join()
        except RequestRefused as caught:
            error = f"rank {self.rank}: {caught}"
        except Exception as caught:  # raised below, or the other ranks would wait for this one
            error = f"rank {self.rank}: {type(caught).__name__}: {caught}"
        wait_for_ranks(self.world)  # a generation may take longer than any time limit
        if may_interrupt:
            stop_request.sync()
        raise_on_any_rank(error, self.world)
        self.fleet.lost.update(result.lost)
        return result
