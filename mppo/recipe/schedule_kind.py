"""The kind of schedule of an update, from the recipe's setting and its layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mppo.recipe.schema import Recipe
from mppo.recipe.sections.roles import ActorConfig, CriticConfig

ScheduleKind = Literal["sequential", "fused", "flush_free"]


@dataclass(frozen=True)
class Obstacle:
    """Why a recipe's update cannot run as wanted, and what to change besides giving up the wish."""

    why: str
    cure: str


def schedule_kind(recipe: Recipe) -> ScheduleKind:
    if stream_obstacle(recipe) is not None:
        return "sequential"
    if recipe.trainer.schedule != "auto":
        return recipe.trainer.schedule
    return "fused" if recipe.trainer.align_overflow else "flush_free"


def stream_obstacle(recipe: Recipe) -> Obstacle | None:
    """What keeps actor and critic from sharing a pipeline; None if they can."""
    if not recipe.algorithm.uses_critic:
        why = f"algorithm.adv_estimator = {recipe.algorithm.adv_estimator} trains no critic"
        return Obstacle(why, "set algorithm.adv_estimator to gae")
    if recipe.pretrains_value:
        why = "trainer.stage = value_pretraining trains no actor"
        return Obstacle(why, "set trainer.stage to ppo")
    return lists_obstacle(recipe)


def lists_obstacle(recipe: Recipe) -> Obstacle | None:
    """What keeps the executor from running an update by lists of actions; None if it can."""
    sections: dict[str, ActorConfig | CriticConfig] = {"actor": recipe.actor}
    if recipe.algorithm.uses_critic:
        sections["critic"] = recipe.critic
    stages = {s.megatron.pipeline_model_parallel_size: name for name, s in sections.items()}
    if len(stages) > 1:
        (first, one), (second, other) = stages.items()
        why = f"the {one} has {first} pipeline stages, the {other} {second}"
        return Obstacle(why, "give both the same megatron.pipeline_model_parallel_size")
    unmeasured = recipe.actor.ptx_coef > 0 or not recipe.needs_actor_logprobs
    if unmeasured and _records_experts(recipe.actor):
        why = (
            "the actor's routers repeat or balance recorded choices of experts, and some "
            "sequences are recorded by a pass between the mini-batches"
        )
        cure = "set actor.router_replay to off and actor.megatron.moe_aux_loss_coeff to 0"
        return Obstacle(why, cure)
    return None


def streams_forward(recipe: Recipe) -> bool:
    """Whether the forward-only passes of actor, critic and reference run through one pipeline."""
    roles = [role for role in recipe.roles() if role.name != "reward_model"]
    megatrons = [role.megatron for role in roles]
    stages = {megatron.pipeline_model_parallel_size for megatron in megatrons}
    # the actor's pass reads the hidden states of the reference's pass
    one_by_one = recipe.trainer.schedule == "sequential" or recipe.needs_full_kl
    return len(stages) == 1 and max(stages) > 1 and not one_by_one


def forward_groups(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """The roles of each pass of the forward phase, in order; those of one stream are together.

    The actor is left out where the recipe takes the engine's log-probabilities instead.
    """
    used = {role.name for role in recipe.roles()}
    if not recipe.needs_actor_logprobs:
        used.remove("actor")
    # the actor's pass may read the hidden states of the reference's pass
    order = tuple(name for name in ("ref", "actor", "critic") if name in used)
    if len(order) > 1 and streams_forward(recipe):
        return (order,)
    return tuple((name,) for name in order)


def update_groups(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """The roles of each part of an update, in order; those that share a part are together.

    A sequential schedule trains one role after the other, unless their optimizer steps are taken
    together or a timeline records them.
    """
    if not recipe.algorithm.uses_critic:
        return (("actor",),)
    if recipe.pretrains_value:
        return (("critic",),)
    together = recipe.trainer.align_overflow or recipe.trainer.timeline.steps
    if together or schedule_kind(recipe) != "sequential":
        return (("critic", "actor"),)
    return (("critic",), ("actor",))


def _records_experts(section: ActorConfig | CriticConfig) -> bool:
    """Whether a forward-only pass records expert choices (see ``RoleRouting.records``)."""
    megatron, replay = section.megatron, section.router_replay
    balances = megatron.moe_router_load_balancing_type == "aux_loss"
    return replay == "R2" or (replay == "off" and balances and megatron.moe_aux_loss_coeff > 0)
