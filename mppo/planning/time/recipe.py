"""What a step of a recipe computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schedule import schedule_kind, streams_forward
from mppo.config.schema import Recipe
from mppo.config.sections.role_config import RoleConfig
from mppo.pipeline.microbatches import MicroBatchLimits
from mppo.planning.fit import Fit, copied_bytes
from mppo.planning.flops import model_flops
from mppo.planning.memory import experts_per_token
from mppo.planning.outside import own_kv_tokens
from mppo.planning.plan import RolePlan
from mppo.planning.time.generation import Servers
from mppo.planning.time.role_load import RoleLoad, StepSequences
from mppo.planning.time.step import StepLoad


def recipe_sequences(recipe: Recipe, prompt: float | None, response: float | None) -> StepSequences:
    """The sequences of a step.

    Args:
        recipe: the recipe.
        prompt: mean tokens of a prompt, of --mean-prompt; None: the recipe's limit.
        response: the same of a response, of --mean-response.

    Raises:
        ConfigError: a mean is not between 1 and the limit.
    """
    data = recipe.data
    limits = (
        ("--mean-prompt", prompt, "data.max_prompt_length", data.max_prompt_length),
        ("--mean-response", response, "data.max_response_length", data.max_response_length),
    )
    issues = [
        ConfigIssue(key, mean, f"it is not between 1 and {limit_key} = {limit}", "correct it")
        for key, mean, limit_key, limit in limits
        if mean is not None and not 1 <= mean <= limit
    ]
    if issues:
        raise ConfigError(issues)
    return StepSequences(
        data.train_batch_size * recipe.rollout.n,
        data.max_prompt_length if prompt is None else prompt,
        data.max_response_length if response is None else response,
        data.max_response_length,
        recipe.rollout.n,
    )


def recipe_load(
    recipe: Recipe,
    plans: Sequence[RolePlan],
    fit: Fit | None,
    hf_configs: Mapping[str, Any],
    sequences: StepSequences,
) -> StepLoad:
    """What a step of a recipe computes.

    Args:
        recipe: the recipe, with numbers as token budgets (``with_token_budgets``).
        plans: its roles (``plan_roles``).
        fit: what is offloaded, and the engine's memory; None: nothing is, and there is enough.
        hf_configs: Hugging Face config object of each role's model, by role.
        sequences: its sequences.
    """
    world, rollout = plans[0].layout.world, recipe.rollout
    tp = 1 if rollout.name == "local" else rollout.tensor_model_parallel_size
    colocated = rollout.mode == "colocated" and not rollout.urls
    servers = (rollout.servers or max(1, world // tp)) if colocated else max(1, len(rollout.urls))
    room = fit.verdict.kv_tokens if fit is not None else None
    if not colocated and fit is not None:  # on GPUs of the same type
        room = own_kv_tokens(recipe, plans[0].passes[0].kind.shape, plans[0].parameters, fit.gpu)
    uses = [] if fit is None else [copied_bytes(use, fit.table) for use in fit.uses.values()]
    roles = [_role_load(recipe, plan, hf_configs[plan.role.name]) for plan in plans]
    measured = [role.name for role in roles if role.name != "actor" or recipe.needs_actor_logprobs]
    return StepLoad(
        sequences,
        roles,
        Servers(servers, tp, rollout.batch_size, room, rollout.expert_parallel_size),
        schedule_kind(recipe),
        measured,
        world if colocated else world + servers * tp,
        copied=max(uses, default=0),
        overlapped=rollout.generates_ahead,
        streamed=streams_forward(recipe),
    )


def with_batching(load: StepLoad, recipe: Recipe) -> StepLoad:
    """What a step computes with the micro-batches and the recomputation of another recipe.

    Args:
        load: of a recipe that differs in nothing else.
        recipe: the other recipe, with numbers as token budgets.
    """
    roles = {role.name: role for role in recipe.roles()}
    changed = [
        replace(
            one,
            training=_limits(roles[one.name], one.layout.cp, training=True),
            measuring=_limits(roles[one.name], one.layout.cp, training=False),
            recomputes=roles[one.name].megatron.recompute_granularity == "full",
        )
        for one in load.roles
    ]
    return replace(load, roles=changed)


def _role_load(recipe: Recipe, plan: RolePlan, hf_config: Any) -> RoleLoad:
    role, first = plan.role, plan.passes[0]
    trained = role.trained
    section = getattr(recipe, role.name) if trained else None
    return RoleLoad(
        name=role.name,
        shape=first.kind.shape,
        active=experts_per_token(hf_config),
        flops=model_flops(hf_config, role.head),
        layout=plan.layout,
        layers=[passes.layers for passes in plan.passes],
        parameters=plan.stage_parameters,
        policy=role.head == "policy",
        mini_batches=plan.mini_batches,
        epochs=section.ppo_epochs if section is not None else 1,
        training=_limits(role, plan.layout.cp, training=True),
        measuring=_limits(role, plan.layout.cp, training=False),
        model_parameters=plan.parameters,
        recomputes=role.megatron.recompute_granularity == "full",
        cpu_share=section.optim.cpu_offload_fraction if section is not None else 0.0,
    )


def _limits(role: RoleConfig, cp: int, training: bool) -> MicroBatchLimits:
    """Size limit of a micro-batch (``mppo.models.role.Role.micro_batch_spec``)."""
    b = role.batching
    sequences, tokens = b.ppo_micro_batch_size_per_gpu, b.token_budget
    if not training:
        sequences = b.log_prob_micro_batch_size_per_gpu or sequences
        tokens = b.log_prob_max_token_len_per_gpu or tokens
    return MicroBatchLimits(sequences, tokens * cp if b.use_dynamic_bsz else None)
