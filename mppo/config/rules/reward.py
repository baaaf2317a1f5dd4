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
    wire, key = reward.server_format, "reward.format"
    if reward.format and wire is None:
        why = f"has no effect with reward.name = {reward.name} and no server"
        yield ConfigIssue(key, reward.format, why, "set reward.name to remote, or leave it out")
    elif reward.format and wire != reward.format:
        why = "with reward.name = rule, the server at reward.url runs programs"
        fix = "set reward.name to remote, or reward.format to sandbox_fusion"
        yield ConfigIssue(key, reward.format, why, fix)
    elif wire is not None and (reward.url or reward.name != "remote"):
        try:
            read_remote_options(reward)
        except ConfigError as error:
            yield from error.issues
