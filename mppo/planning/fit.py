"""Which parts a run offloads, and whether it then fits its GPUs and its hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

from mppo.parallel import device
from mppo.parallel.collectives import largest_of_ranks
from mppo.planning.outside import Engine, colocated_engine
from mppo.planning.peaks import RankUse
from mppo.planning.residency import (
    SAVE,
    TRAINED_PARTS,
    Residency,
    residency,
    role_parts,
    with_early_returns,
)
from mppo.planning.run_plan import RolePlan, plan_roles, plan_use
from mppo.planning.verdict import Moment, Verdict, judge, planned_moments
from mppo.recipe.gpu_types import DEFAULT_GPU, GpuType, find_gpu
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.megatron import Offload
from mppo.recipe.sections.role_config import RoleConfig

NOTHING = Offload()
EVERYTHING = Offload(parameters=True, gradients=True, optimizer=True)
SPARE = 0.05
"""Share of the GPU's memory that parts which come back early leave free: they only save time, and
the plan of a phase is exact within about this much."""


@dataclass(frozen=True)
class Fit:
    """What is where, and whether it fits; ``uses`` and ``verdicts`` are by rank, of one rank for
    every combination of pipeline stages. Without ``engine``, the engine is on other GPUs."""

    gpu: GpuType
    engine: Engine | None
    offload: Mapping[str, Offload]
    table: Residency
    uses: Mapping[int, RankUse]
    verdicts: Mapping[int, Verdict]

    @property
    def tightest(self) -> int:
        """The rank with the largest moment."""
        return max(self.verdicts, key=lambda rank: _shortage(self.verdicts[rank]))

    def moment(self, rank: int, name: str) -> Moment:
        return next(m for m in self.verdicts[rank].moments if m.phase == name)

    @property
    def verdict(self) -> Verdict:
        return self.verdicts[self.tightest]


def planned_gpu(recipe: Recipe, name: str | None = None) -> GpuType:
    """The GPU for which a run is planned on another machine: of --gpu (``name``), the recipe, or
    the default."""
    if name is not None:
        return find_gpu(name)
    return find_gpu(str(recipe.trainer.gpu or DEFAULT_GPU), "trainer.gpu")


def own_gpu(recipe: Recipe) -> GpuType | None:
    """The GPU for which a run on this machine is planned; None on the CPU. Collective.

    Without ``trainer.gpu`` it is the smallest GPU of all ranks, so that all choose alike.
    """
    nbytes = device.nbytes()
    if nbytes is None:
        return None
    if recipe.trainer.gpu is not None:
        return planned_gpu(recipe)
    (smallest,) = largest_of_ranks([-nbytes])
    return GpuType(device.name(), int(-smallest))


def plan_fit(recipe: Recipe, plans: Sequence[RolePlan], gpu: GpuType) -> Fit:
    """Choose what is offloaded, and judge whether every rank fits."""
    uses = {rank: plan_use(recipe, plans, rank) for rank in ranks_by_stages(plans)}
    shape = plans[0].passes[0].kind.shape
    engine = colocated_engine(recipe, plans[0].layout.world, shape, plans[0].parameters)
    offload, engine = choose_offload(recipe, list(uses.values()), engine, gpu)
    most = int(gpu.nbytes * (1 - SPARE))
    table = with_early_returns(
        residency(recipe, offload),
        lambda table, phase: _largest(phase, uses.values(), table, engine) <= most,
    )
    verdicts = {rank: _judged(recipe, use, table, engine, gpu) for rank, use in uses.items()}
    return Fit(gpu, engine, offload, table, uses, verdicts)


def planned_residency(
    recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any], gpu: GpuType | None
) -> Residency:
    """Who is where in each phase of a run, with the choice of ``auto``.

    Without ``gpu`` the run is on the CPU, where ``auto`` offloads nothing and everything comes back
    early.
    """
    if gpu is None:
        offload = {role.name: _given(role) or NOTHING for role in recipe.roles()}
        return with_early_returns(residency(recipe, offload), lambda table, phase: True)
    return plan_fit(recipe, plan_roles(recipe, world_size, hf_configs), gpu).table


def ranks_by_stages(plans: Sequence[RolePlan]) -> list[int]:
    """The first rank of every combination of pipeline stages; the others need as much memory."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(plans[0].layout.world):
        first.setdefault(tuple(plan.layout.coordinates(rank).pp for plan in plans), rank)
    return sorted(first.values())


def choose_offload(
    recipe: Recipe, uses: Sequence[RankUse], engine: Engine | None, gpu: GpuType
) -> tuple[dict[str, Offload], Engine | None]:
    """Choose the parts of the roles whose ``offload`` is ``auto``.

    Of all choices with which every rank fits, the one that copies the fewest bytes in an iteration,
    then the one with the fewest parts. If none fits, the KV cache is planned for fewer sequences;
    if still none fits, everything is offloaded.

    Returns:
        The parts of every role, and the engine with the number of sequences that fits.
    """
    roles = recipe.roles()
    names = [role.name for role in roles]
    choices = [dict(zip(names, found)) for found in product(*map(_options, roles))]
    tables = [residency(recipe, choice) for choice in choices]
    costs = [max(copied_bytes(use, table) for use in uses) for table in tables]
    counts = [
        sum(getattr(offload, part) for offload in choice.values() for part in TRAINED_PARTS)
        for choice in choices
    ]
    order = sorted(range(len(choices)), key=lambda i: (costs[i], counts[i]))
    engines = [None] if engine is None else engine.with_fewer_sequences()
    for smaller, number in product(engines, order):
        verdicts = (_judged(recipe, use, tables[number], smaller, gpu) for use in uses)
        if all(verdict.fits for verdict in verdicts):
            return choices[number], smaller
    return choices[-1], engines[-1]


def _given(role: RoleConfig) -> Offload | None:
    offload = role.megatron.offload
    if offload == "auto":
        return None
    return NOTHING if isinstance(offload, str) else offload


def _options(role: RoleConfig) -> list[Offload]:
    """The choices for a role; the last has everything that may be offloaded."""
    given = _given(role)
    if given is not None:
        return [given]
    parts = role_parts(role)
    subsets = chain.from_iterable(combinations(parts, n) for n in range(len(parts) + 1))
    return [Offload(**dict.fromkeys(subset, True)) for subset in subsets]


def copied_bytes(use: RankUse, table: Residency) -> int:
    """Bytes that an iteration without a save copies to the device."""
    phases = [table[phase] for phase in table if phase != SAVE]
    return sum(
        size
        for before, after in zip([phases[-1], *phases], phases)
        for name, parts in use.parts.items()
        for part, size in parts.items()
        if before[name][part] == "host" and after[name][part] == "device"
    )


def _judged(
    recipe: Recipe, use: RankUse, table: Residency, engine: Engine | None, gpu: GpuType
) -> Verdict:
    everything = residency(recipe, dict.fromkeys(use.parts, EVERYTHING))
    return judge(planned_moments(use, table, engine, everything), recipe, gpu, engine)


def _largest(phase: str, uses: Iterable[RankUse], table: Residency, engine: Engine | None) -> int:
    return max(
        moment.total
        for use in uses
        for one, moment in zip(use.uses, planned_moments(use, table, engine, table))
        if one.phase == phase
    )


def _shortage(verdict: Verdict) -> int:
    if verdict.engine is None or verdict.lacking_tokens <= 0:
        return verdict.over
    return max(verdict.over, verdict.lacking_tokens * verdict.engine.kv_per_token)
