"""The plan of a run: layout per role, micro-batches, parameters and memory, without a GPU, process
group or weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

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
    trains_gathering,
)
from mppo.planning.passes import Lengths, StagePasses
from mppo.planning.peaks import RankPart, RankUse, rank_use
from mppo.planning.streaming import stream_bytes
from mppo.planning.token_budgets import (
    TokenCost,
    balanced_budgets,
    given_budgets,
    with_budgets,
)
from mppo.recipe.model_shape import model_shape, with_value_bins
from mppo.recipe.schedule_kind import schedule_kind, streams_forward
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig
from mppo.recipe.sections.roles import DEFAULT_TOKEN_BUDGET
from mppo.weights.table import Table, parameter_table


@dataclass(frozen=True)
class RolePlan:
    """The plan of one role; lists are by pipeline stage, of one rank.

    Args:
        mini_batches: optimizer steps per PPO step; 0 for a frozen role.
        micro_batches: per data-parallel rank and mini-batch (per pass for a frozen role), if
            every sequence has the maximal length.
        micro_batch_tokens: tokens of the largest micro-batch.
    """

    role: RoleConfig
    layout: Layout
    parameters: int
    stage_parameters: list[int]
    memory: list[Memory]
    passes: list[StagePasses]
    mini_batches: int
    micro_batches: int
    micro_batch_tokens: int


def plan_roles(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> list[RolePlan]:
    """The plan of every role of a recipe that is valid for this world size."""
    recipe = with_token_budgets(recipe, world_size, hf_configs)
    plans: list[RolePlan] = []
    for role in recipe.roles():
        own = hf_configs[role.name]
        table = parameter_table(model_shape(with_value_bins(own, role.value_bins)))
        kind = model_kind(own, table.shape, experts_per_token(own))
        plans.append(_plan_role(recipe, role, world_size, table, kind))
    return plans


def plan_use(recipe: Recipe, plans: Sequence[RolePlan], rank: int) -> RankUse:
    """The memory of one rank in each phase."""
    stages = [plan.layout.coordinates(rank).pp for plan in plans]
    parts = [RankPart(plan.memory[stage], plan.passes[stage]) for plan, stage in zip(plans, stages)]
    actor = plans[0]
    streamed = stream_bytes(
        parameter_table(actor.passes[0].kind.shape),
        actor.layout,
        stages[0],
        tuple(tuple(passes.layers) for passes in actor.passes),
        recipe.rollout.sync_bucket_mb << 20,
        BYTES[recipe.model.dtype],
    )
    return rank_use(recipe, parts, streamed, rank)


def with_token_budgets(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> Recipe:
    """The recipe with numbers in place of the token budgets that are ``auto``; a run starts with
    these."""
    given = given_budgets(recipe)
    if None not in given.values():
        return recipe
    return with_budgets(
        recipe, balanced_budgets(given, token_costs(recipe, world_size, hf_configs))
    )


def token_costs(
    recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]
) -> dict[str, TokenCost]:
    """Estimated cost of a token of actor and critic, in sequences of the maximal length."""
    numbers = with_budgets(recipe, dict.fromkeys(given_budgets(recipe), DEFAULT_TOKEN_BUDGET))
    response = recipe.data.max_response_length
    longest = recipe.data.max_prompt_length + response
    costs: dict[str, TokenCost] = {}
    for plan in plan_roles(numbers, world_size, hf_configs):
        name = plan.role.name
        if plan.mini_batches:
            flops = model_flops(hf_configs[name], "value" if name == "critic" else "policy")
            operations = flops.training([longest], response) / longest
            recomputes = plan.role.megatron.recompute_granularity == "full"
            # a rank computes budget x CP tokens by the TP x CP x PP ranks of a pipeline
            split = plan.layout.tp * plan.layout.pp
            compute = operations * (4 / 3 if recomputes else 1) / split
            held = [passes.in_flight * passes.kept for passes in plan.passes]
            tokens, cp = plan.micro_batch_tokens, plan.layout.cp
            costs[name] = TokenCost(compute, tuple(stage * cp / tokens for stage in held))
    return costs


def _plan_role(
    recipe: Recipe, role: RoleConfig, world_size: int, table: Table, kind: ModelKind
) -> RolePlan:
    layout = role.megatron.layout(world_size)
    layers = role_stage_layers(role, table.shape.num_layers, world_size)
    value_head = role.head == "value"
    counts = [
        count_parameters(table, layout, stage, owned, value_head, role.freeze)
        for stage, owned in enumerate(layers)
    ]
    mini_batches, sequences = _mini_batches(recipe, role)
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length + role.end_slots
    share = ceil(sequences / layout.dp)
    micro_batches, tokens = _micro_batches(role, layout, share, longest, mini_batches > 0)
    everything = ceil(recipe.data.train_batch_size * recipe.rollout.n / layout.dp)
    measured = role.name != "actor" or recipe.needs_actor_logprobs
    forward = _micro_batches(role, layout, everything, longest, training=False)[1]
    lengths = Lengths(
        training=tokens,
        forward=forward if measured else tokens,
        sequence=longest,
        response=recipe.data.max_response_length,
    )
    overlaps, streamed = schedule_kind(recipe) != "sequential", streams_forward(recipe)
    size = BYTES[role.dtype]
    cpu_share = getattr(recipe, role.name).optim.cpu_offload_fraction if mini_batches else 0.0
    return RolePlan(
        role=role,
        layout=layout,
        parameters=model_parameters(table, value_head),
        stage_parameters=[count.total for count in counts],
        memory=[role_memory(role, layout, count, role.dtype, cpu_share) for count in counts],
        passes=[
            StagePasses(
                *(role, kind, layout, stage, owned, lengths, micro_batches, mini_batches),
                *(size, overlaps, streamed, trains_gathering(table, owned, role.freeze)),
            )
            for stage, owned in enumerate(layers)
        ],
        mini_batches=mini_batches,
        micro_batches=micro_batches,
        micro_batch_tokens=tokens,
    )


def _mini_batches(recipe: Recipe, role: RoleConfig) -> tuple[int, int]:
    """Optimizer steps per PPO step, and sequences of a mini-batch (of a pass of a frozen role)."""
    batch, samples = recipe.data.train_batch_size, recipe.rollout.n
    if not role.trained:
        return 0, batch * samples
    section = recipe.actor if role.name == "actor" else recipe.critic
    size = section.ppo_mini_batch_size or recipe.actor.ppo_mini_batch_size
    return section.ppo_epochs * ceil(batch / size), size * samples


def _micro_batches(
    role: RoleConfig, layout: Layout, sequences: int, longest: int, training: bool
) -> tuple[int, int]:
    """The number of micro-batches for sequences of maximal length, and the tokens of one."""
    b = role.batching
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
