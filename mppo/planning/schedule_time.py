"""Simulated time and idle share of an update under each kind of schedule, for the dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mppo.parallel.layout import Layout
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.schedule import make_schedule
from mppo.pipeline.streams import KINDS
from mppo.recipe.schedule_kind import schedule_kind, stream_obstacle
from mppo.recipe.schema import Recipe


@dataclass(frozen=True)
class TrainedRole:
    """The work of a trained role in an update.

    Args:
        micro_batches: number of micro-batches of each mini-batch, per data-parallel rank.
        cost: cost of a micro-batch's forward pass through all layers, in an arbitrary unit.
    """

    name: str
    layout: Layout
    mini_batches: int
    micro_batches: int
    cost: float
    recomputes: bool

    @property
    def cost_per_rank(self) -> float:
        """Cost of a forward pass through all stages, on one tensor- and context-parallel rank."""
        return self.stage_cost(1)

    def stage_cost(self, stages: int) -> float:
        """Cost of a forward pass on one stage if the model had ``stages`` pipeline stages."""
        ranks = self.layout.tp * self.layout.cp
        return self.cost / (ranks * stages)

    def work(self, stages: int, unit: float) -> RoleWork:
        """Make the input of ``make_schedule``, with costs in multiples of ``unit``."""
        forward, chunks = self.stage_cost(stages) / unit, self.layout.vpp
        backward = (3 if self.recomputes else 2) * forward
        count = self.micro_batches
        if chunks > 1:  # the interleaved schedule needs a multiple of PP
            count = math.ceil(count / stages) * stages
        counts = (count,) * self.mini_batches
        return RoleWork(self.name, counts, forward, backward, chunks=chunks)


def describe_schedule(recipe: Recipe, roles: Sequence[TrainedRole]) -> str:
    """Describe the recipe's schedule and compare all kinds: time, idle share, activations."""
    kind, obstacle = schedule_kind(recipe), stream_obstacle(recipe)
    title = f"trainer.schedule = {recipe.trainer.schedule}: {kind}"
    if obstacle is not None:
        return "\n".join([f"{title}, because {obstacle.why}", *_gain(roles)])
    stages = roles[0].layout.pp
    works = _works(roles, stages)
    lines = [title]
    sequential = make_schedule("sequential", works, stages).simulation
    for other in KINDS:
        simulation = make_schedule(other, works, stages).simulation
        lines.append(
            f"{other}: {simulation.idle_share:.1%} of the time idle, "
            f"{simulation.makespan / sequential.makespan:.2f} of sequential's time, "
            f"{simulation.in_flight[0]:.3g} micro-batches in flight on the first stage"
        )
    return "\n".join([*lines, *_balance(roles, works, stages)])


_REPORTED_BELOW = 0.97
"""A balanced micro-batch size is reported only if it takes less than this share of the time."""


def _balance(roles: Sequence[TrainedRole], works: Sequence[RoleWork], stages: int) -> Iterator[str]:
    """Report the gain if larger micro-batches of the cheaper role made both passes equally long."""
    cheap, costly = sorted(roles, key=lambda role: role.cost_per_rank)
    ratio = cheap.cost_per_rank / costly.cost_per_rank
    # the interleaved schedule needs a multiple of PP
    multiple = stages if cheap.layout.vpp > 1 else 1
    count = multiple * max(1, round(cheap.micro_batches * ratio / multiple))
    larger = replace(cheap, micro_batches=count, cost=cheap.cost * cheap.micro_batches / count)
    unit = costly.stage_cost(stages)
    equal = tuple((larger if role is cheap else role).work(stages, unit) for role in roles)
    now = make_schedule("flush_free", tuple(works), stages).simulation
    then = make_schedule("flush_free", equal, stages).simulation
    if then.makespan < _REPORTED_BELOW * now.makespan:
        yield (
            f"a micro-batch of the {cheap.name} costs {ratio:.2f} of the {costly.name}'s; if "
            f"{cheap.micro_batches / count:.1f} times as large, both cost about the same, and "
            f"flush_free takes {then.makespan / now.makespan:.2f} of its time"
        )


def _works(roles: Sequence[TrainedRole], stages: int) -> tuple[RoleWork, ...]:
    """Make the schedule's input; the unit is the longest pass, so equal models have cost 1."""
    unit = max(role.stage_cost(stages) for role in roles)
    return tuple(role.work(stages, unit) for role in roles)


def _gain(roles: Sequence[TrainedRole]) -> list[str]:
    """Report the gain of equal pipeline sizes if unequal ones prevent a shared pipeline."""
    if len({role.layout.pp for role in roles}) < 2:
        return []
    time = busy = 0.0
    for role in roles:
        stages = role.layout.pp
        simulation = make_schedule("sequential", (role.work(stages, 1.0),), stages).simulation
        time += simulation.makespan
        busy += simulation.makespan * (1 - simulation.idle_share)
    stages = max(role.layout.pp for role in roles)
    free = make_schedule("flush_free", _works(roles, stages), stages).simulation.idle_share
    return [
        f"sequential: {1 - busy / time:.1%} of the time idle; with {stages} pipeline stages each "
        f"and as many micro-batches, flush_free: {free:.1%}"
    ]
