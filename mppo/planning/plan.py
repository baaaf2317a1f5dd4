"""The dry run: layout per role and rank, micro-batches, parameters and memory.

Needs only a recipe, a world size and the models' configs: no GPU, process group or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from mppo.config.load import resolved_yaml
from mppo.config.rules.rule import RoleCase, roles_in_use
from mppo.config.schedule import schedule_kind, streams_forward
from mppo.config.schema import Recipe
from mppo.config.sections.roles import DEFAULT_TOKEN_BUDGET
from mppo.parallel.layout import Layout
from mppo.planning.activations import ModelKind, model_kind
from mppo.planning.flops import model_flops
from mppo.planning.memory import (
    BYTES,
    Memory,
    count_parameters,
    experts_per_token,
    model_parameters,
    role_memory,
    role_stage_layers,
    transformer_engine_is_installed,
)
from mppo.planning.passes import Lengths, StagePasses
from mppo.planning.peaks import Peaks, RankPart, rank_peaks
from mppo.planning.schedule import TrainedRole, describe_schedule
from mppo.planning.streaming import stream_bytes
from mppo.planning.token_budgets import (
    TokenCost,
    balanced_budgets,
    given_budgets,
    token_cost,
    with_budgets,
)
from mppo.weights.shape import model_shape
from mppo.weights.table import Table, parameter_table

RANKS_SHOWN = 64
GIB = 1024**3


@dataclass(frozen=True)
class RolePlan:
    """The plan of one role.

    Args:
        role: name and sections.
        layout: its layout.
        parameters: parameters of the model.
        stage_parameters: parameters of one rank, by pipeline stage.
        memory: memory that one rank keeps, by pipeline stage.
        passes: its passes, by pipeline stage.
        mini_batches: optimizer steps per PPO step; 0 for a frozen role.
        micro_batches: micro-batches per data-parallel rank and mini-batch (per pass for a frozen
            role), if every sequence has the maximal length.
        micro_batch_tokens: tokens of the largest micro-batch.
    """

    role: RoleCase
    layout: Layout
    parameters: int
    stage_parameters: list[int]
    memory: list[Memory]
    passes: list[StagePasses]
    mini_batches: int
    micro_batches: int
    micro_batch_tokens: int


def plan_roles(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> list[RolePlan]:
    """The plan of every role that the recipe builds.

    Args:
        recipe: a recipe that is valid for this world size (``mppo.config.checks``).
        world_size: number of ranks.
        hf_configs: Hugging Face config object of each role's model, by role.
    """
    recipe = with_token_budgets(recipe, world_size, hf_configs)
    plans: list[RolePlan] = []
    for role in roles_in_use(recipe):
        own = hf_configs[role.name]
        table = parameter_table(model_shape(own))
        kind = model_kind(own, table.shape, experts_per_token(own))
        plans.append(_plan_role(recipe, role, world_size, table, kind))
    return plans


def plan_peaks(recipe: Recipe, plans: Sequence[RolePlan], rank: int) -> Peaks:
    """The peaks of memory of one rank.

    Args:
        recipe: the recipe.
        plans: of ``plan_roles``.
        rank: the rank.
    """
    stages = [plan.layout.coordinates(rank).pp for plan in plans]
    parts = [RankPart(plan.memory[stage], plan.passes[stage]) for plan, stage in zip(plans, stages)]
    actor = plans[0]
    streamed = stream_bytes(
        parameter_table(actor.passes[0].kind.shape),
        actor.layout,
        stages[0],
        [passes.layers for passes in actor.passes],
        recipe.rollout.sync_bucket_mb << 20,
        BYTES[recipe.model.dtype],
    )
    return rank_peaks(parts, streamed, rank)


def with_token_budgets(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> Recipe:
    """The recipe with numbers in place of the token budgets that are ``auto``.

    A run starts with these numbers. For the arguments see ``plan_roles``.
    """
    given = given_budgets(recipe)
    if None not in given.values():
        return recipe
    return with_budgets(
        recipe, balanced_budgets(given, token_costs(recipe, world_size, hf_configs))
    )


def token_costs(
    recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]
) -> dict[str, TokenCost]:
    """Estimated cost of a token of actor and critic, in sequences of the maximal length.

    For the arguments see ``plan_roles``.
    """
    numbers = with_budgets(recipe, dict.fromkeys(given_budgets(recipe), DEFAULT_TOKEN_BUDGET))
    response = recipe.data.max_response_length
    longest = recipe.data.max_prompt_length + response
    costs: dict[str, TokenCost] = {}
    for plan in plan_roles(numbers, world_size, hf_configs):
        name = plan.role.name
        if plan.mini_batches:
            flops = model_flops(hf_configs[name], "value" if name == "critic" else "policy")
            costs[name] = token_cost(
                flops.training([longest], response) / longest,
                plan.layout,
                plan.role.megatron.recompute_granularity == "full",
                [passes.in_flight * passes.kept for passes in plan.passes],
                plan.micro_batch_tokens,
            )
    return costs


def describe_plan(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> str:
    """The dry run as text: resolved recipe, layouts, micro-batches, parameters, memory."""
    plans = plan_roles(recipe, world_size, hf_configs)
    budgets = given_budgets(with_token_budgets(recipe, world_size, hf_configs))
    parts = [
        "# resolved recipe\n" + resolved_yaml(recipe).rstrip(),
        f"# layout of {world_size} ranks\n" + _layouts(plans),
        "# where each rank sits\n" + _ranks(plans, world_size),
        "# one iteration\n" + _iteration(recipe, plans),
        "# schedule of an update\n" + _schedule(recipe, plans, budgets),
        "# parameters and estimated memory per GPU\n" + _memory(recipe, plans),
    ]
    return "\n\n".join(parts) + "\n"


def _plan_role(
    recipe: Recipe, role: RoleCase, world_size: int, table: Table, kind: ModelKind
) -> RolePlan:
    layout = role.megatron.layout(world_size)
    layers = role_stage_layers(role, table.shape.num_layers, world_size)
    value_head = role.has_value_head
    counts = [
        count_parameters(table, layout, stage, owned, value_head)
        for stage, owned in enumerate(layers)
    ]
    mini_batches, sequences = _mini_batches(recipe, role)
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    share = ceil(sequences / layout.dp)
    micro_batches, tokens = _micro_batches(role, layout, share, longest, mini_batches > 0)
    everything = ceil(recipe.data.train_batch_size * recipe.rollout.n / layout.dp)
    lengths = Lengths(
        training=tokens,
        forward=_micro_batches(role, layout, everything, longest, training=False)[1],
        sequence=longest,
        response=recipe.data.max_response_length,
    )
    by_lists, streamed = schedule_kind(recipe) != "sequential", streams_forward(recipe)
    size = BYTES[role.dtype]
    return RolePlan(
        role=role,
        layout=layout,
        parameters=model_parameters(table, value_head),
        stage_parameters=[count.total for count in counts],
        memory=[role_memory(role, layout, count, role.dtype) for count in counts],
        passes=[
            StagePasses(
                role, kind, layout, stage, owned, lengths, micro_batches, size, by_lists, streamed
            )
            for stage, owned in enumerate(layers)
        ],
        mini_batches=mini_batches,
        micro_batches=micro_batches,
        micro_batch_tokens=tokens,
    )


def _mini_batches(recipe: Recipe, role: RoleCase) -> tuple[int, int]:
    """Optimizer steps per PPO step, and sequences of a mini-batch (of a pass of a frozen role)."""
    batch, samples = recipe.data.train_batch_size, recipe.rollout.n
    if not role.trained:
        return 0, batch * samples
    section = recipe.actor if role.name == "actor" else recipe.critic
    size = section.ppo_mini_batch_size or recipe.actor.ppo_mini_batch_size
    return section.ppo_epochs * ceil(batch / size), size * samples


def _micro_batches(
    role: RoleCase, layout: Layout, sequences: int, longest: int, training: bool
) -> tuple[int, int]:
    """Number of micro-batches for a rank's sequences of maximal length, and the tokens of one.

    Args:
        role: the role.
        layout: its layout.
        sequences: sequences of one data-parallel rank.
        longest: tokens of each sequence.
        training: in training; False: in a forward-only pass.
    """
    b = role.section
    per_micro, budget = b.ppo_micro_batch_size_per_gpu, b.token_budget
    if not training:
        per_micro = b.log_prob_micro_batch_size_per_gpu or per_micro
        budget = b.log_prob_max_token_len_per_gpu or budget
    if b.use_dynamic_bsz:
        per_micro = max(1, budget * layout.cp // longest)
    per_micro = min(per_micro, sequences)
    count = ceil(sequences / per_micro)
    if layout.vpp > 1:  # the interleaved schedule needs a multiple of PP
        count = ceil(count / layout.pp) * layout.pp
    return count, per_micro * longest


def _layouts(plans: list[RolePlan]) -> str:
    rows: list[tuple[str, ...]] = [
        ("role", "layout", "TP", "PP", "VPP", "CP", "DP", "EP", "ETP", "EDP")
    ]
    for plan in plans:
        layout = plan.layout
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.dp, layout.ep, layout.etp)
        rows.append((plan.role.name, layout.describe(), *map(str, (*sizes, layout.edp))))
    return _columns(rows)


def _ranks(plans: list[RolePlan], world_size: int) -> str:
    rows: list[tuple[str, ...]] = [("rank", *(plan.role.name for plan in plans))]
    for rank in range(min(world_size, RANKS_SHOWN)):
        cells: list[str] = []
        for plan in plans:
            at = plan.layout.coordinates(rank)
            cell = f"tp{at.tp} cp{at.cp} dp{at.dp} pp{at.pp}"
            experts = plan.layout.ep > 1 or plan.layout.etp > 1
            cells.append(f"{cell} etp{at.etp} ep{at.ep}" if experts else cell)
        rows.append((str(rank), *cells))
    text = _columns(rows)
    if world_size > RANKS_SHOWN:
        text += f"\n... and {world_size - RANKS_SHOWN} more ranks in the same order"
    return text


def _iteration(recipe: Recipe, plans: list[RolePlan]) -> str:
    sequences = recipe.data.train_batch_size * recipe.rollout.n
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    lines = [
        f"{recipe.data.train_batch_size} prompts x {recipe.rollout.n} samples = {sequences} "
        f"sequences of at most {longest} tokens; the numbers below are for sequences of that length"
    ]
    rows: list[tuple[str, ...]] = [
        ("role", "optimizer steps", "micro-batches per rank", "tokens each", "bubble")
    ]
    for plan in plans:
        steps = str(plan.mini_batches) if plan.mini_batches else "frozen"
        tokens = f"<= {plan.micro_batch_tokens:,}"
        share = f"{plan.layout.bubble_fraction(plan.micro_batches):.0%}"
        rows.append((plan.role.name, steps, str(plan.micro_batches), tokens, share))
    return "\n".join([*lines, _columns(rows)])


def _schedule(recipe: Recipe, plans: list[RolePlan], budgets: Mapping[str, int | None]) -> str:
    """The schedule; a pass costs in proportion to parameters and tokens."""
    roles = [
        TrainedRole(
            plan.role.name,
            plan.layout,
            plan.mini_batches,
            plan.micro_batches,
            plan.parameters * plan.micro_batch_tokens,
            plan.role.megatron.recompute_granularity == "full",
        )
        for plan in reversed(plans)
        if plan.mini_batches
    ]
    text = describe_schedule(recipe, roles)
    if None not in given_budgets(recipe).values():
        return text
    numbers = ", ".join(
        f"{name} {budgets[name]:,}" + (" (auto)" if given is None else "")
        for name, given in given_budgets(recipe).items()
    )
    return f"{text}\ntokens per GPU of a micro-batch, for passes of equal cost: {numbers}"


def _memory(recipe: Recipe, plans: list[RolePlan]) -> str:
    rows: list[tuple[str, ...]] = [
        ("role", "parameters", "on one GPU", "weights", "gradients", "optimizer", "sum")
    ]
    for plan in plans:
        stage = max(range(plan.layout.pp), key=lambda s: plan.memory[s].resident)
        part = plan.memory[stage]
        sizes = (part.weights, part.gradients, part.optimizer, part.resident)
        rows.append(
            (
                plan.role.name,
                f"{plan.parameters:,}",
                f"{plan.stage_parameters[stage]:,}",
                *map(_gib, sizes),
            )
        )
    lines = [_columns(rows)]
    latent = any(plan.layout.tp > 1 and plan.passes[0].kind.shape.mla for plan in plans)
    if latent and not transformer_engine_is_installed():
        lines.append(
            "Transformer Engine is not installed here; with it, every tensor-parallel rank holds "
            "latent attention's down projections complete"
        )
    return "\n".join(lines) + "\n\n" + _peaks(recipe, plans)


def _peaks(recipe: Recipe, plans: list[RolePlan]) -> str:
    """Peaks of a rank on the first stage, on the last, and of the one with the largest peak."""
    world = plans[0].layout.world
    first: dict[tuple[int, ...], int] = {}  # a rank for every combination of stages
    for rank in range(world):
        stages = tuple(plan.layout.coordinates(rank).pp for plan in plans)
        first.setdefault(stages, rank)
    peaks = {rank: plan_peaks(recipe, plans, rank) for rank in first.values()}
    largest = max(peaks, key=lambda rank: max(peaks[rank].by_phase.values()))
    shown = sorted({min(peaks), largest, max(peaks)})
    peaks = {rank: peaks[rank] for rank in shown}
    phases = list(peaks[largest].by_phase)
    rows: list[tuple[str, ...]] = [("peak of a GPU", *(f"rank {rank}" for rank in peaks))]
    rows += [(phase, *(_gib(p.by_phase[phase]) for p in peaks.values())) for phase in phases]
    rows.append(("between steps", *(_gib(p.resident) for p in peaks.values())))
    rows.append(("CUDA context and NCCL", *(_gib(p.outside) for p in peaks.values())))
    actor = plans[0].parameters * BYTES[recipe.rollout.dtype or recipe.model.dtype]
    engine = actor // recipe.rollout.tensor_model_parallel_size
    lines = [_columns(rows)]
    if recipe.rollout.mode == "colocated":
        lines.append(f"rollout engine: {_gib(engine)} of weights more, plus its KV cache")
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 1024**2:.2f} MiB"


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
