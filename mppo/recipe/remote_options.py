"""Reading of ``reward.kwargs`` for a reward server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import regex
from pydantic import ValidationError

from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.recipe.load import translate
from mppo.recipe.sections.remote import (
    REMOTE_FORMATS,
    JudgeOptions,
    RemoteOptions,
    SandboxFusionOptions,
)
from mppo.recipe.sections.reward import RewardConfig

_KEY = "reward.kwargs"


def read_remote_options(reward: RewardConfig) -> RemoteOptions:
    """Read and check the options of the recipe's reward server; ConfigError for an unknown key, a
    missing one, or one with an invalid value."""
    assert reward.server_format is not None
    kind = REMOTE_FORMATS[reward.server_format]
    known = list(kind.model_fields)
    issues = [_unknown(key, reward.kwargs[key], known) for key in reward.kwargs.keys() - set(known)]
    if issues:
        raise ConfigError(issues)
    try:
        options = kind.model_validate(reward.kwargs)
    except ValidationError as error:
        issues = [_issue(issue, reward.server_format) for issue in translate(error)]
        raise ConfigError(issues) from None
    if isinstance(options, SandboxFusionOptions):
        issues = _time_issues(options, reward.timeout_s)
    if isinstance(options, JudgeOptions):
        issues = _judge_issues(options)
    if issues:
        raise ConfigError(issues)
    return options


def _unknown(key: str, value: Any, known: list[str]) -> ConfigIssue:
    guess = nearest(key, known)
    fix = (f"did you mean {guess!r}? " if guess else "") + f"the keys are {', '.join(known)}"
    return ConfigIssue(f"{_KEY}.{key}", value, "no such parameter", fix)


def _issue(issue: ConfigIssue, wire: str) -> ConfigIssue:
    """The issue under its key in the recipe; pydantic's input of a missing key is all of them."""
    if issue.why == "field required":
        why, fix = f"reward.format = {wire} needs it", "set it"
        return ConfigIssue(f"{_KEY}.{issue.key}", None, why, fix)
    return replace(issue, key=f"{_KEY}.{issue.key}")


def _time_issues(options: SandboxFusionOptions, timeout_s: float) -> list[ConfigIssue]:
    needed = options.compile_timeout_s + options.run_timeout_s
    if timeout_s > needed:
        return []
    why = f"a request may take {needed:g} s by the time limits in {_KEY}"
    fix = f"set it above {needed:g}, or lower {_KEY}.run_timeout_s or compile_timeout_s"
    return [ConfigIssue("reward.timeout_s", timeout_s, why, fix)]


def _judge_issues(options: JudgeOptions) -> list[ConfigIssue]:
    issues = []
    if "{response}" not in options.template:
        why, fix = "does not contain {response}", "write {response} where the response belongs"
        issues.append(ConfigIssue(f"{_KEY}.template", options.template, why, fix))
    try:
        groups = regex.compile(options.pattern).groups
        why = "" if groups else "has no group for the score"
    except regex.error as error:
        why = f"is not a regular expression: {error}"
    if why:
        fix = r"put the number into parentheses: score: (\d+)"
        issues.append(ConfigIssue(f"{_KEY}.pattern", options.pattern, why, fix))
    if options.range and not options.range[0] < options.range[1]:
        why, fix = "is not a lowest and a highest score", "give two numbers, the lower one first"
        issues.append(ConfigIssue(f"{_KEY}.range", options.range, why, fix))
    return issues
