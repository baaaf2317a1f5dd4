"""What a cross-field rule is: a small function from a case to the issues it finds.

Each rule names the keys it reads. A key that is already known to be wrong silences the rules that
read it, so that one mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from mppo.config.errors import ConfigIssue
from mppo.config.schema import Recipe
from mppo.config.sections.megatron import MegatronConfig
from mppo.config.sections.roles import BatchingConfig
from mppo.weights.shape import ModelShape


@dataclass(frozen=True)
class RoleCase:
    """One model of the run.

    Args:
        name: ``actor``, ``critic`` or ``ref``.
        section: its section of the recipe.
        megatron: its layout; the actor's where ``ref.megatron`` is null.
        key: dotted key under which that layout stands.
        path: its model.
        path_key: dotted key under which that model stands.
    """

    name: str
    section: BatchingConfig
    megatron: MegatronConfig
    key: str
    path: str
    path_key: str


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at.

    Args:
        recipe: the recipe.
        world_size: number of ranks.
        shapes: model sizes by role; a role whose sizes are not known is absent.
        positions: longest sequence the actor's position encoding knows; None: not known.
    """

    recipe: Recipe
    world_size: int
    shapes: dict[str, ModelShape]
    positions: int | None = None

    @cached_property
    def roles(self) -> tuple[RoleCase, ...]:
        """The models this recipe builds."""
        return roles_in_use(self.recipe)


Rule = Callable[[RuleContext], Iterator[ConfigIssue]]
RULES: list[tuple[tuple[str, ...], Rule]] = []
"""Every rule with the keys it reads, in the order of its modules."""


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Enter a rule into ``RULES``.

    Args:
        keys: dotted keys or sections it reads; ``*`` stands for every role.
    """

    def enter(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return enter


def roles_in_use(recipe: Recipe) -> tuple[RoleCase, ...]:
    """Actor, then critic and reference where the recipe needs them."""
    actor, critic, ref = recipe.actor, recipe.critic, recipe.ref
    shared = (recipe.model.path, "model.path")
    roles = [RoleCase("actor", actor, actor.megatron, "actor.megatron", *shared)]
    if recipe.algorithm.uses_critic:
        model = (critic.path, "critic.path") if critic.path else shared
        roles.append(RoleCase("critic", critic, critic.megatron, "critic.megatron", *model))
    if recipe.uses_reference:
        model = (ref.path, "ref.path") if ref.path else shared
        key = "ref.megatron" if ref.megatron else "actor.megatron"
        layout = ref.megatron or actor.megatron
        roles.append(RoleCase("ref", ref.batching(actor), layout, key, *model))
    return tuple(roles)


def world_size_of(recipe: Recipe) -> int:
    """Ranks a recipe asks for: nodes times GPUs per node, or the fewest that fit every role."""
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
