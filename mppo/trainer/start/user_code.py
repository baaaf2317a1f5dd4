"""Code and data that a recipe names, looked at before a model is read or torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from mppo.agents.agent_check import check_agent
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schema import Recipe
from mppo.data.verifiers_environment import environment_rows
from mppo.rewards.workers.named_code import KEY, checked_form, import_callable
from mppo.trainer.start.first_rows import SPLITS, row_issues
from mppo.trainer.start.user_parts import NO_PARTS, UserParts


def input_issues(
    recipe: Recipe,
    remarks: list[str] | None = None,
    parts: UserParts = NO_PARTS,
    splits: Sequence[str] = SPLITS,
) -> list[ConfigIssue]:
    """Import the recipe's reward function, agent and tools, check their parameters, make its
    environment, and read rows of the data files that are here. ``remarks`` receives a line for code
    that needs a package that is not installed here; None: that is an issue."""
    if recipe.trainer.replay is not None and "train" in splits:
        return []
    issues = row_issues(recipe, splits)
    reward, agent = recipe.reward, recipe.rollout.agent
    if reward.name == "function" and parts.reward is None:
        try:
            name = str(reward.function)
            found = import_callable(KEY, name, "function", "name a function of it")
            checked_form(name, found, reward.kwargs)
        except ConfigError as error:
            issues += _issues(error, remarks)
    if agent is not None and parts.agent is None:
        try:
            check_agent(agent)
        except ConfigError as error:
            issues += _issues(error, remarks)
    if (made := recipe.rollout.environment) is not None:
        split = "train" if "train" in splits else "val"
        try:
            environment_rows(made.verifiers, made.arguments, split, 1)
        except ConfigError as error:
            issues += _issues(error, remarks)
    return issues


def _issues(error: ConfigError, remarks: list[str] | None) -> list[ConfigIssue]:
    """The issues; none if a package of the job's machine is all that is missing here."""
    cause = error.__cause__
    if remarks is not None and isinstance(cause, ModuleNotFoundError):
        (issue,) = error.issues
        remarks.append(f"{issue.key} = {issue.value!r} was not checked: {cause}")
        return []
    return list(error.issues)
