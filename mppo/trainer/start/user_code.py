"""Code and data that a recipe names, looked at before anything is started."""

from __future__ import annotations

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schema import Recipe
from mppo.trainer.start.first_rows import row_issues


def check_user_inputs(recipe: Recipe, remarks: list[str]) -> None:
    """Import the recipe's reward function, agent and tools, check their signatures, and read the
    first row of the data files that are here.

    Args:
        remarks: receives a line for code that needs a package that is not installed here.

    Raises:
        ConfigError: with all issues.
    """
    issues = row_issues(recipe)
    if recipe.reward.name == "function":
        from mppo.rewards.function import load_function

        try:
            load_function(str(recipe.reward.function), recipe.reward.kwargs)
        except ConfigError as error:
            issues += _issues(error, remarks)
    if recipe.rollout.agent is not None:
        from mppo.agents.build import build_agent  # it imports torch

        try:
            build_agent(recipe)
        except ConfigError as error:
            issues += _issues(error, remarks)
    if issues:
        raise ConfigError(issues)


def _issues(error: ConfigError, remarks: list[str]) -> list[ConfigIssue]:
    """The issues; none if a package of the job's machine is all that is missing here."""
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError):
        (issue,) = error.issues
        remarks.append(f"{issue.key} = {issue.value!r} was not checked: {cause}")
        return []
    return list(error.issues)
