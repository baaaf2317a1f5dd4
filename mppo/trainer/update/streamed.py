"""An update in which actor and critic run through one pipeline, by a schedule's lists."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.executor import run_update
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.timeline import Event, Recorder, chrome_trace, planned_events
from mppo.planning.flops import update_flops
from mppo.report.timeline import draw_timeline
from mppo.safety.disk import replace_text
from mppo.trainer.update.role_update import PlannedMiniBatch, RoleUpdate

TakeSteps = Callable[[dict[str, StepResult], int], None]
"""Told the results of steps and their mini-batch; raises where the run must not go on."""


class StreamedUpdate:
    """All mini-batches of several roles in one stream.

    Args:
        kind: of the schedule.
        updates: the roles that learn.
        batch: the global batch.
        align: a step that is not finite is skipped by all roles together.
        on_steps: told every step.
        would_leave: whether this rank would leave the update after so many of its steps.
        recorder: notes when what ran; None: nothing is noted.
    """

    def __init__(
        self,
        kind: ScheduleKind,
        updates: Sequence[RoleUpdate],
        batch: Batch,
        align: bool,
        on_steps: TakeSteps,
        would_leave: Callable[[int, int], bool],
        recorder: Recorder | None = None,
    ) -> None:
        self._updates = {update.role.name: update for update in updates}
        self._align, self._on_steps, self._would_leave = align, on_steps, would_leave
        self._recorder = recorder
        planned = {
            update.role.name: [update.planned(batch, part) for part in update.mini_batches]
            for update in updates
        }
        self.schedule = _schedule(kind, updates, planned, batch)
        self._roles = {
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
        self._left: BaseException | None = None
        self._leave = False

    @property
    def steps(self) -> int:
        """Optimizer steps of all roles."""
        return len(self.schedule.steps)

    def run(self) -> bool:
        """Carry the schedule out; collective.

        Returns:
            False where a rank would leave the update: what was under way is done, and no step is
            taken any more.

        Raises:
            Exception: what ``on_steps`` raised, when what was under way is done.
        """
        begin = time.perf_counter()
        first = next(iter(self._updates.values()))
        links = Links(first.role.groups)
        finished = run_update(self.schedule, self._roles, links, self._step, self._recorder)
        device.synchronize()
        self._share_time(time.perf_counter() - begin)
        if self._left is not None:
            raise self._left
        return finished

    def _leaves(self) -> bool:
        return self._would_leave(self._taken, self.steps)

    def _step(self, role: str, mini_batch: int) -> bool:
        """Take a step, or all steps of its round where they are taken together."""
        names = [role]
        if self._align:
            names = [n for n, u in self._updates.items() if mini_batch < len(u.mini_batches)]
            if role != names[0]:
                return True
        norms = {}
        for name in names:
            update = self._updates[name]
            norm, stats, leave = self._roles[name].wait()
            norms[name] = norm
            update.norms.append(norm)
            update.stats.append(stats)
            self._leave |= leave
        self._taken += len(names)
        if self._leave and self._taken < self.steps:
            return False
        results = take_steps([self._updates[name].role for name in names], norms)
        try:
            self._on_steps(results, mini_batch)
        except Exception as error:
            self._left = error
            return False
        return True

    def _share_time(self, seconds: float) -> None:
        """Roles that compute side by side have taken time in proportion to their operations."""
        total = sum(update.flops for update in self._updates.values())
        for update in self._updates.values():
            update.seconds += seconds * update.flops / total


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
        panels = [(f"{schedule.kind}, planned", planned_events(schedule)), ("measured", rows)]
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
    return make_schedule(kind, tuple(work), updates[0].role.layout.pp)


def _pass_cost(update: RoleUpdate, planned: Sequence[PlannedMiniBatch], batch: Batch) -> float:
    """Operations of one micro-batch on average; every role has as many ranks for each."""
    mask_T = update.role.predicted_mask_T(batch)
    total = sum(update_flops(update.model_flops, batch, part.plan, mask_T) for part in planned)
    return total / sum(len(part.plan[0]) for part in planned)
