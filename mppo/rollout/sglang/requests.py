"""Requests of all ranks to the servers, repeated where servers are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.dispatch import DispatchResult
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.in_flight import InFlightRequests
from mppo.rollout.sglang.straggler_abort import StragglerAbort
from mppo.supervision import stop_request
from mppo.supervision.stop_request import StepInterrupted

ATTEMPTS = 3

Call = Callable[[SGLangApi, Any], Any]


class Requests:
    """Sends jobs, each rank to its own servers.

    Args:
        fleet: the servers.
        restore: brings lost servers back, with the current weights, of which it returns the
            version; collective.
        rank, world: this rank and the number of ranks.
        device: where tensors are exchanged between ranks.
        group: process group of the ranks; None is the default one.
    """

    def __init__(
        self,
        fleet: Fleet,
        restore: Callable[[], int],
        rank: int,
        world: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.fleet, self.restore = fleet, restore
        self.rank, self.world, self.device, self.group = rank, world, device, group
        self._names = 0

    def new_name(self) -> str:
        """A name not given before, the same on every rank; collective."""
        self._names += 1
        return str(self._names)

    def launch(
        self, jobs: Sequence[Any], call: Call, in_flight: int, tail: StragglerAbort | None = None
    ) -> InFlightRequests:
        """Send this rank's jobs on their way."""
        self.fleet.wake("kv_cache")
        return InFlightRequests(lambda: self.fleet.apis, jobs, call, in_flight, tail)

    def landed(self, flight: InFlightRequests) -> dict[int, Any]:
        """Results, by job index, of what one flight could do; collective.

        Raises:
            RuntimeError: on every rank, when a server refused a request.
        """
        return self._taken(flight, may_leave=False).results

    def answers(
        self,
        jobs: Sequence[Any],
        call: Call,
        in_flight: int,
        tail: StragglerAbort | None = None,
        flight: InFlightRequests | None = None,
        may_leave: bool = True,
    ) -> dict[int, Any]:
        """Results of all jobs, by index, lost servers being revived; collective.

        Args:
            jobs: this rank's.
            call, in_flight: see ``dispatch``.
            tail: see ``InFlightRequests``.
            flight: all jobs, on their way already; None: they are sent now.
            may_leave: whether the step may be abandoned here.

        Raises:
            RuntimeError: on every rank, when a server refused a request or none was left.
            StepInterrupted: on every rank.
        """
        results: dict[int, Any] = {}
        lost: dict[Any, str] = {}
        for _ in range(ATTEMPTS):
            waiting = [index for index in range(len(jobs)) if index not in results]
            if flight is None:
                flight = self.launch([jobs[i] for i in waiting], call, in_flight, tail)
            outcome, flight = self._taken(flight, may_leave), None
            results.update({waiting[place]: r for place, r in outcome.results.items()})
            lost = outcome.lost or lost
            left = len(jobs) - len(results)
            if not any(all_gather_objects(left, self.world, self.group)):
                return results
            self.restore()
        told = f"rank {self.rank}: {left} of {len(jobs)} requests not served in {ATTEMPTS} attempts"
        why = f"{told}: {lost}{self.fleet.last_words()}"
        raise_on_any_rank(why if left else None, self.world, self.group)
        raise AssertionError("some rank had requests left")

    def _taken(self, flight: InFlightRequests, may_leave: bool) -> DispatchResult[Any]:
        """What became of a flight; collective."""
        outcome: DispatchResult[Any] = DispatchResult()
        error = None
        try:
            with suppress(StepInterrupted):  # said by meet
                outcome = flight.wait() if may_leave else flight.land()
        except RequestRefused as caught:
            error = f"rank {self.rank}: {caught}"
        if may_leave:
            stop_request.sync()
        raise_on_any_rank(error, self.world, self.group)
        self.fleet.lost.update(outcome.lost)
        return outcome
