"""Memory that a run needs on each node, and what the node has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mppo.planning.checkpoint_space import COPY, host_copy_bytes, host_copy_warning
from mppo.planning.fit import Fit, plan_fit, ranks_by_stages
from mppo.planning.passes import StagePasses
from mppo.planning.run_plan import RolePlan
from mppo.planning.verdict import describe_verdict
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.gpu_types import GIB, GpuType
from mppo.recipe.schema import Recipe

GIVEN = "trainer.host_memory_gib"
PARTS, ACTIVATIONS, CHECKPOINT = (
    "offloaded parts", "offloaded activations", "copy of a checkpoint"
)  # fmt: skip
ON_CPU, AVERAGE, ENGINE = "optimizer on the CPU", "moving average", "engine's processes"
FIXES = {
    CHECKPOINT: "set trainer.async_save=false: saves then make no copy in host memory",
    PARTS: "use more nodes or wider layouts, so that fewer parts have to leave the GPUs",
    ACTIVATIONS: "set megatron.recompute_granularity=full and no megatron.offload_activations",
    ON_CPU: "lower optim.cpu_offload_fraction",
    AVERAGE: "set actor.ema_decay=null: no moving average",
    ENGINE: "set rollout.mode=disaggregated: the engine on other nodes",
}
PROCESS = 4 * GIB
"""Bytes of a rank's process besides tensors: Python, torch, CUDA's libraries, NCCL's buffers,
prompts and responses. An estimate."""
ENGINE_PROCESS = 4 * GIB
"""Bytes of an SGLang server's processes per GPU. An estimate."""


@dataclass(frozen=True)
class HostNeed:
    """Host memory of the node that needs most, bytes by purpose."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def moved(self) -> int:
        """Bytes of what the GPUs leave there, without which the run cannot proceed."""
        return sum(self.parts.get(name, 0) for name in (PARTS, ACTIVATIONS, ON_CPU))


def host_need(recipe: Recipe, plans: Sequence[RolePlan], fit: Fit) -> HostNeed:
    """The memory that a run needs on a node."""
    world = plans[0].layout.world
    per_node = min(recipe.trainer.n_gpus_per_node or world, world)
    by_stages = {_stages(plans, rank): rank for rank in ranks_by_stages(plans)}
    of_rank = {rank: _rank_parts(recipe, plans, fit, rank) for rank in by_stages.values()}
    shared = {
        "ranks' processes": per_node * PROCESS,
        CHECKPOINT: host_copy_bytes(recipe, list(plans)),
        ENGINE: per_node * ENGINE_PROCESS * bool(fit.engine and fit.engine.context),
    }
    nodes: dict[tuple[tuple[int, ...], ...], HostNeed] = {}
    for first in range(0, world, per_node):
        ranks = range(first, min(first + per_node, world))
        kinds = tuple(sorted(_stages(plans, rank) for rank in ranks))
        if kinds not in nodes:
            found = [of_rank[by_stages[kind]] for kind in kinds]
            sums = {name: sum(parts[name] for parts in found) for name in found[0]}
            nodes[kinds] = HostNeed({name: n for name, n in {**sums, **shared}.items() if n})
    return max(nodes.values(), key=lambda need: need.total)


def memory_warnings(
    recipe: Recipe, plans: Sequence[RolePlan], gpu: GpuType | None, memory: int, source: str
) -> list[str]:
    """What a run on this machine should be warned of before it starts.

    Args:
        gpu: None: the run is on the CPU.
        memory: bytes of a node that the run may use; ``source`` says where that number comes from.

    Raises:
        ConfigError: what leaves the GPUs does not fit into the memory of a node.
    """
    if gpu is None:
        warning = host_copy_warning(host_copy_bytes(recipe, list(plans)), memory, source)
        return [] if warning is None else [warning]
    fit = plan_fit(recipe, plans, gpu)
    found: list[str] = []
    if not fit.verdict.fits:
        found.append(f"by the plan this run lacks memory\n{describe_verdict(fit.verdict)}")
    need = host_need(recipe, plans, fit)
    issue = host_issue(need, memory, source)
    if issue is not None and need.moved > memory:
        raise ConfigError([issue])
    return found if issue is None else [*found, str(issue)]


def planned_host_issue(need: HostNeed, recipe: Recipe) -> ConfigIssue | None:
    """As ``host_issue``, for a run on another machine: None without ``trainer.host_memory_gib``."""
    given = recipe.trainer.host_memory_gib
    return None if given is None else host_issue(need, int(given * GIB), GIVEN)


def host_issue(need: HostNeed, memory: int, source: str) -> ConfigIssue | None:
    """An issue if a node needs more than its ``memory`` bytes, which ``source`` tells; else
    None."""
    if need.total <= memory:
        return None
    parts = ", ".join(f"{name} {n / GIB:.1f}" for name, n in need.parts.items())
    why = f"a node needs {need.total / GIB:.1f} GiB: {parts}"
    return ConfigIssue(
        "the host's memory", f"{memory / GIB:.1f} GiB ({source})", why, "; or ".join(_fixes(need))
    )


def _fixes(need: HostNeed) -> list[str]:
    """Changes to the recipe that free host memory, the most effective first."""
    found = [
        (n, f"{FIXES[name]} (frees {n / GIB:.1f} GiB)")
        for name, n in need.parts.items()
        if name in FIXES
    ]
    found.sort(reverse=True)
    return [text for _, text in found] + ["give the job more memory per node (SLURM: --mem=0)"]


def _stages(plans: Sequence[RolePlan], rank: int) -> tuple[int, ...]:
    return tuple(plan.layout.coordinates(rank).pp for plan in plans)


def _rank_parts(recipe: Recipe, plans: Sequence[RolePlan], fit: Fit, rank: int) -> dict[str, int]:
    stages = _stages(plans, rank)
    passes = [plan.passes[stage] for plan, stage in zip(plans, stages)]
    actor = plans[0].stage_parameters[stages[0]]
    return {
        PARTS: fit.uses[rank].host(fit.table),
        ACTIVATIONS: int(max(map(_activations, passes))),
        ON_CPU: sum(plan.memory[stage].on_cpu for plan, stage in zip(plans, stages)),
        AVERAGE: actor * COPY * (recipe.actor.ema_decay is not None),
    }


def _activations(passes: StagePasses) -> float:
    """Bytes of a role's activations in host memory, of all micro-batches in flight."""
    megatron = passes.role.megatron
    if not passes.trained or not megatron.offload_activations:
        return 0.0
    layers = [passes.layer(layer) for layer in passes.layers]
    if megatron.recompute_granularity == "full":
        one = sum(layer.stream for layer in layers)
    else:
        one = sum(layer.kept for layer in layers)
    return passes.in_flight * one
