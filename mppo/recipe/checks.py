"""Every rule of a recipe that needs several keys, the layout or the models' configs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.model_shape import max_positions, model_shape
from mppo.recipe.rules import (  # noqa: F401 (importing them fills RULES)
    agent_rules,
    algorithm_rules,
    data_rules,
    engine_rules,
    layout_rules,
    reward_rules,
    training_rules,
)
from mppo.recipe.rules.rule import RULES, RuleContext
from mppo.recipe.schema import Recipe


def check_recipe(
    recipe: Recipe,
    world_size: int,
    hf_configs: Mapping[str, Any],
    keys_with_issues: Collection[str] = (),
    ranks_per_node: int | None = None,
) -> list[ConfigIssue]:
    """Apply every rule between keys, layouts and models. Reads no file.

    Args:
        hf_configs: Hugging Face config object of each role's model, by role; rules that need the
            config of a role that is absent skip that role.
        keys_with_issues: keys that already have an issue; rules that read one of them are skipped.
        ranks_per_node: number of ranks on a node; None: ``trainer.n_gpus_per_node``.
    """
    issues: list[ConfigIssue] = []
    shapes = {}
    for role in recipe.roles():
        if role.name in hf_configs:
            try:
                shapes[role.name] = model_shape(hf_configs[role.name])
            except ValueError as error:
                issues.append(model_issue(role.path_key, role.path, error))
    limits = {name: max_positions(hf_configs[name]) for name in shapes}
    positions = {name: limit for name, limit in limits.items() if limit is not None}
    per_node = ranks_per_node or recipe.trainer.n_gpus_per_node
    context = RuleContext(recipe, world_size, shapes, positions, hf_configs, per_node)
    for keys, function in RULES:
        if not any(_reads(pattern, key) for pattern in keys for key in keys_with_issues):
            issues += function(context)
    return without_duplicates(issues)


def model_issue(key: str, name: str, error: Exception) -> ConfigIssue:
    return ConfigIssue(
        key, name, " ".join(str(error).split()), "give a model folder of a known family"
    )


def without_duplicates(issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """One issue per key and reason: roles that share a model find the same ones."""
    return list({(issue.key, issue.why): issue for issue in issues}.values())


def _reads(pattern: str, key: str) -> bool:
    """Whether one is a prefix of the other; ``*`` in the pattern matches any part."""
    return all(part in ("*", name) for part, name in zip(pattern.split("."), key.split(".")))
