"""What a step of a recipe computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mppo.batch.microbatches import MicroBatchLimits
from mppo.dumps.experience_files import read_batch_tensor
from mppo.dumps.step_dump import UNREADABLE, dumped_steps
from mppo.planning.fit import Fit, copied_bytes
from mppo.planning.flops import model_flops
from mppo.planning.memory import experts_per_token
from mppo.planning.outside import own_kv_tokens
from mppo.planning.run_plan import RolePlan
from mppo.planning.time.generation_time import Servers
from mppo.planning.time.role_load import ONE_TURN, AgentTurns, RoleLoad, StepSequences
from mppo.planning.time.step import StepLoad
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.recipe.schedule_kind import schedule_kind, streams_forward
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig


def recipe_sequences(
    recipe: Recipe,
    prompt: float | None,
    response: float | None,
    dump: Path | None = None,
    turns: AgentTurns = ONE_TURN,
) -> StepSequences:
    """The sequences of a step.

    Args:
        prompt, response: mean tokens, of --mean-prompt and --mean-response; None: the recipe's
            limit.
        dump: a run's dumped steps, of --lengths, whose lengths the sequences have instead.

    Raises:
        ConfigError: a mean is not between 1 and the limit, the folder has no lengths or longer
            ones, or the turns are not those of an agent of the recipe.
    """
    data, known = recipe.data, tuple[int, ...]()
    keys = ("--mean-prompt", "--mean-response")
    issues: list[ConfigIssue] = []
    if dump is not None:
        keys = ("--lengths: mean prompt", "--lengths: mean response")
        issues = [
            ConfigIssue(key, mean, "--lengths has the lengths", "remove one of the two")
            for key, mean in (("--mean-prompt", prompt), ("--mean-response", response))
            if mean is not None
        ]
        prompt, known = dumped_lengths(dump)
        response = sum(known) / len(known)
    limits = (
        (keys[0], prompt, "data.max_prompt_length", data.max_prompt_length),
        (keys[1], response, "data.max_response_length", data.max_response_length),
    )
    issues += [
        ConfigIssue(key, mean, f"it is not between 1 and {limit_key} = {limit}", "correct it")
        for key, mean, limit_key, limit in limits
        if mean is not None and not 1 <= mean <= limit
    ]
    if known and known[-1] > data.max_response_length:
        why = f"it has a response of {known[-1]} tokens, more than data.max_response_length"
        fix = f"set data.max_response_length={known[-1]}"
        issues.append(ConfigIssue("--lengths", str(dump), why, fix))
    mean = data.max_response_length if response is None else response
    issues += _turn_issues(recipe, turns, mean)
    if issues:
        raise ConfigError(issues)
    options = sglang_options(recipe.rollout.server_args)
    return StepSequences(
        data.train_batch_size * recipe.rollout.n,
        data.max_prompt_length if prompt is None else prompt,
        mean,
        data.max_response_length,
        recipe.rollout.n,
        known,
        turns,
        cached=not options.get("disable_radix_cache"),
    )


def dumped_lengths(path: Path) -> tuple[float, tuple[int, ...]]:
    """Mean tokens of a prompt, and the ascending lengths of all responses, of the dumped steps of a
    run folder, of its folder ``rollouts``, or of a step's folder. An agent's tokens between those
    of the policy belong to the response. ConfigError if there is none, or one cannot be read."""
    prompts, responses = list[int](), list[int]()
    fix = "give the folder of a run with trainer.dump_rollouts=true"
    for folder in dumped_steps(path).values():
        names = ("lengths_B", "end_B", "response_B", "inserted_B")
        try:
            whole, ends, made, inserted = (read_batch_tensor(folder, name) for name in names)
            answers = made + inserted
            prompts += map(int, whole - ends - answers)
            responses += map(int, answers)
        except UNREADABLE as error:
            why = f"the lengths of {folder.name} cannot be read: {error}"
            raise ConfigError([ConfigIssue("--lengths", str(path), why, fix)]) from error
    if not any(responses):
        why = "it has no dumped step" if path.exists() else "it does not exist"
        raise ConfigError([ConfigIssue("--lengths", str(path), why, fix)])
    return sum(prompts) / len(prompts), tuple(sorted(responses))


def _turn_issues(recipe: Recipe, turns: AgentTurns, response: float) -> Iterator[ConfigIssue]:
    if turns == ONE_TURN:
        return
    agent = recipe.rollout.agent
    if agent is None:
        why, fix = "rollout.agent is null: a response is one turn", "remove it"
        yield ConfigIssue("--turns", turns.count, why, fix)
        return
    if not 1 <= turns.count <= agent.max_turns:
        why = f"it is not between 1 and rollout.agent.max_turns = {agent.max_turns}"
        yield ConfigIssue("--turns", turns.count, why, "correct it")
    for key, value in (("--turn-seconds", turns.seconds), ("--turn-tokens", turns.tokens)):
        if not 0 <= value < float("inf"):
            yield ConfigIssue(key, value, "it is not a number from 0 on", "correct it")
    if turns.inserted >= response:
        why = f"{turns.count:g} turns add {turns.inserted:g} tokens, a response has {response:g}"
        yield ConfigIssue("--turn-tokens", turns.tokens, why, "correct one of them")


def recipe_load(
    recipe: Recipe,
    plans: Sequence[RolePlan],
    fit: Fit | None,
    hf_configs: Mapping[str, Any],
    sequences: StepSequences,
) -> StepLoad:
    """What a step of a recipe computes, whose token budgets are numbers (``with_token_budgets``).
    Without ``fit`` nothing is offloaded, and there is memory enough."""
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
    """The load with the micro-batches and the recomputation of a recipe that differs in nothing
    else."""
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
