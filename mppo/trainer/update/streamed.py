"""An update that runs actor and critic through one pipeline by the lists of a schedule."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from mppo.batch.batch import Batch
from mppo.models.optimizer import StepResult
from mppo.models.role import take_steps
from mppo.models.streamed_role import StreamedRole
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects
from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import Schedule
from mppo.pipeline.schedule_checks import checked_schedule
from mppo.pipeline.timeline import Event, update_trace
from mppo.planning.flops import update_flops
from mppo.recipe.schedule_kind import ScheduleKind
from mppo.safety.disk import replace_text
from mppo.supervision.exit_report import say
from mppo.trainer.update.role_update import PlannedMiniBatch, RoleUpdate

TakeSteps = Callable[[dict[str, StepResult], int], None]
"""Called with the results of optimizer steps and their mini-batch; raises to stop the run."""


class StreamedUpdate:
    """All mini-batches of several roles in one schedule: the arguments of the executor. The
    constructor is collective. With ``align`` all roles skip a step together if a loss or gradient
    of one is not finite, and ``on_steps`` is called once per round. ``wants_to_stop``: whether this
    rank wants to end the update early, given the number of steps taken and that of all steps."""

    def __init__(
        self,
        kind: ScheduleKind,
        updates: Sequence[RoleUpdate],
        batch: Batch,
        align: bool,
        on_steps: TakeSteps,
        wants_to_stop: Callable[[int, int], bool],
    ) -> None:
        self._updates = {update.role.name: update for update in updates}
        self._align, self._on_steps = align, on_steps
        planned = {
            update.role.name: [update.planned(batch, part) for part in update.mini_batches]
            for update in updates
        }
        self.schedule = _schedule(kind, updates, planned, batch)
        self.links = Links(update.role.groups for update in updates)
        # exchanged before the stream, in which stages reach a mini-batch at different times
        self.work = {
            update.role.name: StreamedRole(
                update.role,
                deque(update.mini_batch(batch, part) for part in planned[update.role.name]),
                lambda: wants_to_stop(self._taken, len(self.schedule.steps)),
            )
            for update in updates
        }
        self._taken = 0
        self._error: BaseException | None = None
        self._stop = False

    @property
    def actions(self) -> list[Action]:
        return self.schedule.lists[self.links.stage]

    def rest_after(self, position: int) -> list[Action]:
        """Actions that this stage still executes if the update ends at the step at ``position``."""
        return self.schedule.rest_after(self.links.stage, position)

    def take_step(self, role: str, mini_batch: int) -> bool:
        """Take a role's step, or with ``align`` all steps of the round at the first role's; return
        False if any rank ends the update early or ``on_steps`` raised."""
        names = [role]
        if self._align:
            names = [n for n, u in self._updates.items() if mini_batch < len(u.mini_batches)]
            if role != names[0]:
                return True
        norms = {}
        for name in names:
            update = self._updates[name]
            norm, stats, stop = self.work[name].wait()
            norms[name] = norm
            update.norms.append(norm)
            update.stats.append(stats)
            self._stop |= stop
        self._taken += len(names)
        if self._stop and self._taken < len(self.schedule.steps):
            return False
        results = take_steps([self._updates[name].role for name in names], norms)
        try:
            self._on_steps(results, mini_batch)
        except Exception as error:
            self._error = error
            return False
        return True

    def finish(self) -> None:
        """Wait for all weights, after the executor has ended; raise the error of ``on_steps``."""
        for work in self.work.values():
            work.finish()
        if self._error is not None:
            raise self._error

    @contextmanager
    def timing(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        device.synchronize()
        seconds = time.perf_counter() - begin
        total = sum(update.flops for update in self._updates.values())
        for update in self._updates.values():
            update.seconds += seconds * update.flops / total


def write_timeline(folder: Path, step: int, schedule: Schedule, events: Sequence[Event]) -> None:
    """Write ``step_N.json`` for Perfetto and the report: the measured update and its plan.
    Collective; rank 0 writes."""
    rows = all_gather_objects(list(events))
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        trace = update_trace(schedule, rows)
        replace_text(folder / f"step_{step}.json", json.dumps(trace) + "\n")


def _schedule(
    kind: ScheduleKind,
    updates: Sequence[RoleUpdate],
    planned: dict[str, list[PlannedMiniBatch]],
    batch: Batch,
) -> Schedule:
    costs = [_pass_cost(update, planned[update.role.name], batch) for update in updates]
    work = []
    for update, cost in zip(updates, costs, strict=True):
        name, recomputed = update.role.name, update.role.settings.megatron.recompute_granularity
        # one digit: a finer cost seldom changes the schedule, and equal arguments hit the cache
        forward = round(cost / costs[-1], 1) or 0.1
        backward = (3 if recomputed == "full" else 2) * forward
        counts = tuple(mini_batch.micro_batches for mini_batch in planned[name])
        work.append(RoleWork(name, counts, forward, backward, chunks=update.role.layout.vpp))
    schedule, fault = checked_schedule(kind, tuple(work), updates[0].role.layout.pp)
    if fault is not None and dist.get_rank() == 0 and kind not in _REPORTED:
        _REPORTED.add(kind)
        say(
            f"trainer.schedule: the {kind} schedule of this update is not valid ({fault}). This "
            "update, and later ones of which that is true, run by the sequential schedule, with "
            "the same results; this is said once"
        )
    return schedule


_REPORTED: set[ScheduleKind] = set()
"""Kinds of which this process has reported an invalid schedule."""


def _pass_cost(update: RoleUpdate, planned: Sequence[PlannedMiniBatch], batch: Batch) -> float:
    """Mean operations per micro-batch; each role computes one on the same number of ranks."""
    head_B = update.role.predicted_B(batch)
    total = sum(update_flops(update.model_flops, batch, part.plan, head_B) for part in planned)
    return total / sum(len(part.plan[0]) for part in planned)
