"""Requests of all ranks to the servers, repeated after servers are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.in_flight import DispatchResult, InFlightRequests, StragglerAbort
from mppo.supervision import stop_request
from mppo.supervision.stop_request import StepInterrupted

ATTEMPTS = 3

Call = Callable[[SGLangApi, Any], Any]


class Requests:
    """Sends jobs, each rank to its own servers. Call ``restore`` (collective), which makes every
    server ready and returns the version of the weights, before ``launch`` or ``collect``."""

    def __init__(
        self,
        fleet: Fleet,
        restore: Callable[[], int],
        rank: int,
        world: int,
    ) -> None:
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

            requests: the jobs, if they are in flight already; None: they are started now.
            may_interrupt: a stop request may interrupt the step here.

        Raises:
            RuntimeError: on every rank, if a request of some rank failed or no server was left.
            StepInterrupted: on every rank.
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

    def _result(self, requests: InFlightRequests, may_interrupt: bool) -> DispatchResult[int, Any]:
        result: DispatchResult[int, Any] = DispatchResult()
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
