"""Rules on reward servers, and on the reward model and its part in the score."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.remote_options import read_remote_options
from mppo.recipe.rules.rule import RuleContext, rule
from mppo.recipe.sections.reward_model import RewardModelConfig


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


_ITS_KEYS = (
    "tokenizer_path", "apply_chat_template", "max_length", "weight", "normalize", "clip", "dtype",
)  # fmt: skip


@rule("reward_model")
def reward_model_keys_need_a_model(context: RuleContext) -> Iterator[ConfigIssue]:
    """Keys of the reward model need its path."""
    section = context.recipe.reward_model
    if section.path is not None:
        return
    if section.enable:
        why = "reward_model.enable = true needs it"
        yield ConfigIssue("reward_model.path", None, why, "give the reward model's folder")
        return
    for name in _ITS_KEYS:
        value = getattr(section, name)
        if value != RewardModelConfig.model_fields[name].default:
            shown = value.model_dump() if name == "normalize" else value
            why = "has no effect without reward_model.path"
            fix = "set reward_model.path, or leave it out"
            yield ConfigIssue(f"reward_model.{name}", shown, why, fix)


@rule("reward", "reward_model")
def scores_are_weighted(context: RuleContext) -> Iterator[ConfigIssue]:
    """``reward.weight`` needs a second score; with a reward model, it turns ``reward.*`` on."""
    reward, with_model = context.recipe.reward, context.recipe.reward_model.in_use
    if reward.weight is not None and not with_model:
        why = "has no effect without a reward model: scores come from reward.* alone"
        fix = "leave it out, or set reward_model.path"
        yield ConfigIssue("reward.weight", reward.weight, why, fix)
    if not context.recipe.uses_reward_section and (reward.name != "rule" or reward.verifier):
        key = "name" if reward.name != "rule" else "verifier"
        why = "has no effect: with a reward model, reward.* gives a score only if it has a weight"
        fix = "set reward.weight (0: only log the score), or leave it out"
        yield ConfigIssue(f"reward.{key}", getattr(reward, key), why, fix)


@rule("reward_model")
def reward_model_normalization_is_complete(context: RuleContext) -> Iterator[ConfigIssue]:
    """A mode of normalisation has its mean and deviation, and no keys that it ignores."""
    section = context.recipe.reward_model
    config, key = section.normalize, "reward_model.normalize"
    if not section.in_use:
        return
    for name, default in (("mean", 0.0), ("std", 1.0)):
        value = getattr(config, name)
        if config.mode != "given" and value != default:
            why = f"has no effect with {key}.mode = {config.mode}"
            yield ConfigIssue(f"{key}.{name}", value, why, "set the mode to given, or leave it out")
    found = context.configs.get("reward_model")
    if config.mode == "config" and found is not None:
        for name in ("mean", "std"):
            value: Any = getattr(found, name, None)
            if not _is_finite(value) or (name == "std" and value <= 0):
                why = f"config.json of the reward model has {name} = {value!r}"
                fix = "set the mode to measured, or to given with mean and std"
                yield ConfigIssue(f"{key}.mode", "config", why, fix)
                break


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@rule("reward_model", "model")
def reward_model_has_one_label(context: RuleContext) -> Iterator[ConfigIssue]:
    """The config describes a model that ends in one score."""
    config = context.configs.get("reward_model")
    if config is None:
        return
    key, path = "reward_model.path", context.recipe.reward_model.path
    fix = "give a *ForSequenceClassification with one label, or serve the model (reward.url)"
    kinds = getattr(config, "architectures", None) or []
    if any(kind.endswith("ForCausalLM") for kind in kinds):
        why = f"config.json describes a {kinds[0]}, a language model without a score head"
        yield ConfigIssue(key, path, why, fix)
    elif any(kind.endswith("ForSequenceClassification") for kind in kinds):
        labels = getattr(config, "num_labels", 1)
        if labels != 1:
            why = f"config.json describes a {kinds[0]} with {labels} labels"
            yield ConfigIssue(key, path, why, fix)


@rule("reward_model", "model")
def scored_texts_fit_positions(context: RuleContext) -> Iterator[ConfigIssue]:
    """``max_length`` is at most the model's positions."""
    section, limit = context.recipe.reward_model, context.positions.get("reward_model")
    if section.max_length is not None and limit is not None and section.max_length > limit:
        why = f"is more than the model's {limit} positions"
        yield ConfigIssue("reward_model.max_length", section.max_length, why, "lower it")
