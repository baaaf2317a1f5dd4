"""Token budgets with which a micro-batch of the actor takes as long as one of the critic
(``ppo_max_token_len_per_gpu: auto``), so that one shared pipeline does not wait for the other
role's longer passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mppo.recipe.schema import Recipe
from mppo.recipe.sections.roles import DEFAULT_TOKEN_BUDGET, BatchingConfig


@dataclass(frozen=True)
class TokenCost:
    """Cost of a token of a role's budget on one rank: time of its forward and backward pass in a
    unit that both roles share, and bytes of activations by pipeline stage."""

    compute: float
    activations: tuple[float, ...]


def given_budgets(recipe: Recipe) -> dict[str, int | None]:
    """The token budget of each trained role as the recipe has it; None stands for ``auto``."""
    sections: dict[str, BatchingConfig] = {"actor": recipe.actor}
    if recipe.algorithm.uses_critic:
        sections["critic"] = recipe.critic
    return {
        name: None if section.ppo_max_token_len_per_gpu == "auto" else section.token_budget
        for name, section in sections.items()
    }


def with_budgets(recipe: Recipe, budgets: Mapping[str, int]) -> Recipe:
    sections = {
        name: getattr(recipe, name).model_copy(update={"ppo_max_token_len_per_gpu": budget})
        for name, budget in budgets.items()
    }
    return recipe.model_copy(update=sections)


def balanced_budgets(
    given: Mapping[str, int | None], costs: Mapping[str, TokenCost]
) -> dict[str, int]:
    """Choose the budgets that are not given.

    Such a budget makes a micro-batch cost as much time as one of the other role, but its
    activations take no more memory than the other role's on any stage. If neither is given, the
    role whose tokens cost more has the default.
    """
    budgets = {name: budget for name, budget in given.items() if budget is not None}
    if not budgets:
        budgets[max(given, key=lambda name: costs[name].compute)] = DEFAULT_TOKEN_BUDGET
    for name in given.keys() - budgets.keys():
        (other,) = budgets
        mine, theirs = costs[name], costs[other]
        alike = budgets[other] * theirs.compute / mine.compute
        fitting = [
            budgets[other] * their_bytes / my_bytes
            for my_bytes, their_bytes in zip(mine.activations, theirs.activations, strict=True)
            if my_bytes
        ]
        return budgets | {name: max(1, int(min([alike, *fitting])))}
    return budgets
