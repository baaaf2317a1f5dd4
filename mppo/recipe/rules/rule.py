"""Rules: small functions from a recipe and its models to config issues.

Each rule declares the keys it reads, and is skipped if one of them already has an issue: one
mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from math import lcm
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.model_shape import ModelShape
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig


@dataclass(frozen=True)
class RuleContext:
    """The recipe, ranks and models that a rule reads; mappings are by role, without roles whose
    config has not been read. ``positions``: longest sequence of the position encoding, where it is
    known and limited; ``configs``: Hugging Face config objects."""

    recipe: Recipe
    world_size: int
    shapes: dict[str, ModelShape]
    positions: Mapping[str, int] = field(default_factory=dict)
    configs: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int | None = None

    @cached_property
    def roles(self) -> tuple[RoleConfig, ...]:
        return self.recipe.roles()


MODEL_KEYS = ("model", "critic.path", "ref.path", "reward_model.path")
"""Keys that decide a role's model."""
Rule = Callable[[RuleContext], Iterator[ConfigIssue]]
RoleRule = Callable[[RoleConfig], Iterator[ConfigIssue]]
ModelRule = Callable[[RoleConfig, ModelShape], Iterator[ConfigIssue]]
RULES: list[tuple[tuple[str, ...], Rule]] = []
"""Every rule with the keys it reads, in the order of its modules."""


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a function that reads dotted keys or sections in ``RULES``; ``*`` stands for any
    role."""

    def register(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return register


def role_rule(*keys: str) -> Callable[[RoleRule], RoleRule]:
    """As ``rule``, for a function that looks at one role alone."""

    def register(function: RoleRule) -> RoleRule:
        @rule(*keys)
        @wraps(function)
        def of_all_roles(context: RuleContext) -> Iterator[ConfigIssue]:
            for role in context.roles:
                yield from function(role)

        return function

    return register


def model_rule(*keys: str) -> Callable[[ModelRule], ModelRule]:
    """As ``rule``, for a function that looks at one role and its model; it also reads
    ``MODEL_KEYS``."""

    def register(function: ModelRule) -> ModelRule:
        @rule(*keys, *MODEL_KEYS)
        @wraps(function)
        def of_all_models(context: RuleContext) -> Iterator[ConfigIssue]:
            for role in context.roles:
                if role.name in context.shapes:
                    yield from function(role, context.shapes[role.name])

        return function

    return register


def has_interleaved_role(recipe: Recipe) -> bool:
    """Whether a role has several model chunks on a pipeline stage."""
    return any(role.megatron.virtual_pipeline_model_parallel_size for role in recipe.roles())


def world_size_of(recipe: Recipe) -> int:
    """Number of ranks of a recipe: nodes times GPUs per node, or the fewest that fit every role."""
    trainer = recipe.trainer
    if trainer.n_gpus_per_node:
        return (trainer.nnodes or 1) * trainer.n_gpus_per_node
    needs = [1]
    for role in recipe.roles():
        m = role.megatron
        pp = m.pipeline_model_parallel_size
        needs.append(m.tensor_model_parallel_size * pp * m.context_parallel_size)
        needs.append(m.expert_tensor_size * m.expert_model_parallel_size * pp)
    return lcm(*needs)
