"""Rules: small functions from a recipe and its models to config issues.

Each rule declares the keys it reads, and is skipped if one of them already has an issue: one
mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.schema import Recipe
from mppo.config.sections.megatron import MegatronConfig
from mppo.config.sections.roles import BatchingConfig
from mppo.weights.shape import ModelShape


@dataclass(frozen=True)
class RoleCase:
    """A role of the run, with its model and layout.

    Args:
        name: ``actor``, ``critic``, ``ref`` or ``reward_model``.
        section: its limits of micro-batches; of a trained role its section of the recipe.
        megatron: its layout; the actor's where ``ref.megatron`` is null.
        key: dotted key of that layout.
        path: path of its model.
        path_key: dotted key of that path.
        dtype: type of its parameters.
    """

    name: str
    section: BatchingConfig
    megatron: MegatronConfig
    key: str
    path: str
    path_key: str
    dtype: str

    @property
    def trained(self) -> bool:
        """Whether the role has an optimizer."""
        return self.name in ("actor", "critic")

    @property
    def end_slots(self) -> int:
        """Tokens that its passes add to every sequence: a reward model's score belongs to the slot
        after the last token."""
        return int(self.name == "reward_model")

    @property
    def has_value_head(self) -> bool:
        """Whether the model ends in one number per token, and not in a vocabulary projection."""
        return self.name in ("critic", "reward_model")


@dataclass(frozen=True)
class RuleContext:
    """The recipe, ranks and models that a rule reads.

    Args:
        recipe: the recipe.
        world_size: number of ranks.
        shapes: model sizes by role; without roles whose config has not been read.
        positions: longest sequence of each role's position encoding, by role; without roles whose
            longest sequence is unknown or unlimited.
        configs: Hugging Face config object of each role's model, by role; without those that have
            not been read.
        ranks_per_node: number of ranks on a node; None: unknown.
    """

    recipe: Recipe
    world_size: int
    shapes: dict[str, ModelShape]
    positions: Mapping[str, int] = field(default_factory=dict)
    configs: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int | None = None

    @cached_property
    def roles(self) -> tuple[RoleCase, ...]:
        """The roles that this recipe builds."""
        return roles_in_use(self.recipe)


Rule = Callable[[RuleContext], Iterator[ConfigIssue]]
RULES: list[tuple[tuple[str, ...], Rule]] = []
"""Every rule with the keys it reads, in the order of its modules."""


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a function in ``RULES``.

    Args:
        keys: dotted keys or sections that the rule reads; ``*`` stands for any role.
    """

    def register(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return register


def has_interleaved_role(recipe: Recipe) -> bool:
    """Whether a role has several model chunks on a pipeline stage."""
    return any(role.megatron.virtual_pipeline_model_parallel_size for role in roles_in_use(recipe))


def roles_in_use(recipe: Recipe) -> tuple[RoleCase, ...]:
    """The actor, then critic, reference and reward model if the recipe needs them."""
    actor, critic, ref, dtype = recipe.actor, recipe.critic, recipe.ref, recipe.model.dtype
    shared = (recipe.model.path, "model.path")
    roles = [RoleCase("actor", actor, actor.megatron, "actor.megatron", *shared, dtype)]
    if recipe.algorithm.uses_critic:
        model = (critic.path, "critic.path") if critic.path else shared
        roles.append(RoleCase("critic", critic, critic.megatron, "critic.megatron", *model, dtype))
    if recipe.uses_reference:
        model = (ref.path, "ref.path") if ref.path else shared
        key = "ref.megatron" if ref.megatron else "actor.megatron"
        layout = ref.megatron or actor.megatron
        roles.append(RoleCase("ref", ref.batching(actor), layout, key, *model, dtype))
    reward = recipe.reward_model
    if reward.in_use:
        assert reward.path is not None
        model, key = (reward.path, "reward_model.path"), "reward_model.megatron"
        own = reward.dtype or dtype
        roles.append(RoleCase("reward_model", reward.batching, reward.megatron, key, *model, own))
    return tuple(roles)


def world_size_of(recipe: Recipe) -> int:
    """Number of ranks of a recipe: nodes times GPUs per node, or the fewest that fit every role."""
    trainer = recipe.trainer
    if trainer.n_gpus_per_node:
        return (trainer.nnodes or 1) * trainer.n_gpus_per_node
    needs = [1]
    for role in roles_in_use(recipe):
        m = role.megatron
        pp = m.pipeline_model_parallel_size
        needs.append(m.tensor_model_parallel_size * pp * m.context_parallel_size)
        needs.append(m.expert_tensor_parallel_size * m.expert_model_parallel_size * pp)
    return lcm(*needs)
