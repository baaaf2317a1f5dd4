"""An update in which actor and critic run through one pipeline, by a schedule's lists."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from mppo.batch import Batch
from mppo.config.schedule import ScheduleKind
from mppo.models.optimizer import StepResult
from mppo.models.role import take_steps
from mppo.models.streamed_role import StreamedRole
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects
from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.checks import checked_schedule
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import Schedule
from mppo.pipeline.timeline import Event, chrome_trace, planned_events
from mppo.planning.flops import update_flops
from mppo.report.timeline import draw_timeline
from mppo.safety.disk import replace_text
from mppo.trainer.update.role_update import PlannedMiniBatch, RoleUpdate

TakeSteps = Callable[[dict[str, StepResult], int], None]
"""Told the results of steps and their mini-batch; raises where the run must not go on."""


class StreamedUpdate:
    """All mini-batches of several roles in one stream: what the executor is given.

    Args:
        kind: of the schedule.
        updates: the roles that learn.
        batch: the global batch.
        align: a step that is not finite is skipped by all roles together.
        on_steps: told every step.
        would_leave: whether this rank would leave the update after so many of its steps.

    Attributes:
        schedule: what runs when.
        work: of each role.
        links: to the neighbouring stages.
    """

    def __init__(
        self,
        kind: ScheduleKind,
        updates: Sequence[RoleUpdate],
        batch: Batch,
        align: bool,
        on_steps: TakeSteps,
        would_leave: Callable[[int, int], bool],
    ) -> None:
        self._updates = {update.role.name: update for update in updates}
        self._align, self._on_steps, self._would_leave = align, on_steps, would_leave
        planned = {
            update.role.name: [update.planned(batch, part) for part in update.mini_batches]
            for update in updates
        }
        self.schedule = _schedule(kind, updates, planned, batch)
        self.links = Links(updates[0].role.groups)
        self.work = {
            update.role.name: StreamedRole(
                update.role,
                [
                    partial(update.mini_batch, batch, mini_batch)
                    for mini_batch in planned[update.role.name]
                ],
                self._leaves,
            )
            for update in updates
        }
        self._taken = 0
        self._error: BaseException | None = None
        self._leave = False

    @property
    def actions(self) -> list[Action]:
        """This stage's list."""
        return self.schedule.lists[self.links.stage]

    def rest_after(self, position: int) -> list[Action]:
        """What this stage still does when it leaves its list at a step."""
        return self.schedule.rest_after(self.links.stage, position)

    def take_step(self, role: str, mini_batch: int) -> bool:
        """Take a step, or all steps of its round where they are taken together.

        Returns:
            Whether the update goes on: not where a rank would leave it, or ``on_steps`` raised.
        """
        names = [role]
        if self._align:
            names = [n for n, u in self._updates.items() if mini_batch < len(u.mini_batches)]
            if role != names[0]:
                return True
        norms = {}
        for name in names:
            update = self._updates[name]
            norm, stats, leave = self.work[name].wait()
            norms[name] = norm
            update.norms.append(norm)
            update.stats.append(stats)
            self._leave |= leave
        self._taken += len(names)
        if self._leave and self._taken < len(self.schedule.steps):
            return False
        results = take_steps([self._updates[name].role for name in names], norms)
        try:
            self._on_steps(results, mini_batch)
        except Exception as error:
            self._error = error
            return False
        return True

    def raise_error(self) -> None:
        """Raise what ``on_steps`` raised, now that nothing is on its way."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Roles that compute side by side inside take time in proportion to their operations."""
        begin = time.perf_counter()
        yield
        device.synchronize()
        seconds = time.perf_counter() - begin
        total = sum(update.flops for update in self._updates.values())
        for update in self._updates.values():
            update.seconds += seconds * update.flops / total

    def _leaves(self) -> bool:
        return self._would_leave(self._taken, len(self.schedule.steps))


def write_timeline(folder: Path, step: int, schedule: Schedule, events: Sequence[Event]) -> None:
    """Write ``step_N.json``, which opens in Perfetto, and ``step_N.png``: the plan above what the
    ranks did. Collective; the first rank writes.

    Args:
        folder: where to; made if need be.
        step: the PPO step.
        schedule: what ran.
        events: of this rank.
    """
    rows = all_gather_objects(list(events))
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / f"step_{step}.json", json.dumps(chrome_trace(rows)) + "\n")
        panels = [
            (f"{schedule.kind}, planned", "stage", planned_events(schedule)),
            ("measured, in seconds", "rank", rows),
        ]
        draw_timeline(panels, folder / f"step_{step}.png")


def _schedule(
    kind: ScheduleKind,
    updates: Sequence[RoleUpdate],
    planned: dict[str, list[PlannedMiniBatch]],
    batch: Batch,
) -> Schedule:
    """The schedule of planned mini-batches; the same on every rank."""
    costs = [_pass_cost(update, planned[update.role.name], batch) for update in updates]
    work = []
    for update, cost in zip(updates, costs, strict=True):
        name, recomputed = update.role.name, update.role.spec.megatron.recompute_granularity
        # to one digit: another one is seldom another schedule, and known ones are not made again
        forward = round(cost / costs[-1], 1) or 0.1
        backward = (3 if recomputed == "full" else 2) * forward
        counts = tuple(mini_batch.micro_batches for mini_batch in planned[name])
        work.append(RoleWork(name, counts, forward, backward))
    return checked_schedule(kind, tuple(work), updates[0].role.layout.pp)


def _pass_cost(update: RoleUpdate, planned: Sequence[PlannedMiniBatch], batch: Batch) -> float:
    """Operations of one micro-batch on average; every role has as many ranks for each."""
    mask_T = update.role.predicted_mask_T(batch)
    total = sum(update_flops(update.model_flops, batch, part.plan, mask_T) for part in planned)
    return total / sum(len(part.plan[0]) for part in planned)
