"""Rules on reward servers."""

from __future__ import annotations

from collections.abc import Iterator

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.remote_options import read_remote_options
from mppo.config.rules.rule import RuleContext, rule


@rule("reward")
def remote_options_are_valid(context: RuleContext) -> Iterator[ConfigIssue]:
    """The format of a reward server has the options that it needs, and no others."""
    reward = context.recipe.reward
    if reward.name == "remote":
        try:
            read_remote_options(reward)
        except ConfigError as error:
            yield from error.issues
    elif reward.format != "mppo":
        why = f"has no effect with reward.name = {reward.name}"
        yield ConfigIssue(
            "reward.format", reward.format, why, "set reward.name to remote, or leave it out"
        )
