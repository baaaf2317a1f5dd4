"""Rules on ``critic.freeze``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mppo.config.errors import ConfigIssue, nearest
from mppo.config.rules.rule import MODEL_KEYS, RuleContext, rule
from mppo.weights.frozen import is_frozen, matches, value_model_entries
from mppo.weights.table import Entry, parameter_table


@rule("critic.freeze", "algorithm.adv_estimator")
def patterns_are_regular_expressions(context: RuleContext) -> Iterator[ConfigIssue]:
    """Every pattern is a regular expression, and there is a critic."""
    patterns = context.recipe.critic.freeze
    if patterns and not context.recipe.algorithm.uses_critic:
        estimator = context.recipe.algorithm.adv_estimator
        why = f"algorithm.adv_estimator = {estimator} trains no critic"
        yield ConfigIssue("critic.freeze", list(patterns), why, "leave it out, or choose gae")
    for index, pattern in enumerate(patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            key, why = f"critic.freeze.{index}", f"is not a regular expression: {error}"
            yield ConfigIssue(key, pattern, why, "such as self_attn, or layers\\.[0-3]\\.mlp")


@rule("critic.freeze", "critic.megatron", *MODEL_KEYS)
def patterns_freeze_whole_parameters(context: RuleContext) -> Iterator[ConfigIssue]:
    """Patterns match names of the critic, whole parameters, and not what has to be trained."""
    patterns = context.recipe.critic.freeze
    if not patterns or "critic" not in context.shapes or not _are_valid(patterns):
        return
    entries = list(value_model_entries(parameter_table(context.shapes["critic"])))
    names = [name for entry in entries for name in entry.hf]
    unmatched = [i for i, p in enumerate(patterns) if not any(matches(n, [p]) for n in names)]
    for index in unmatched:
        pattern = patterns[index]
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        close = nearest(pattern, [*parts, *names])
        example = f"the critic has names such as {names[len(names) // 2]}"
        fix = f"did you mean {close}? {example}" if close else example
        why = "matches no parameter of the critic"
        yield ConfigIssue(f"critic.freeze.{index}", pattern, why, fix)
    obstacle = None if unmatched else _obstacle(entries, patterns)
    if obstacle is not None:
        yield ConfigIssue("critic.freeze", list(patterns), *obstacle)


def _are_valid(patterns: Sequence[str]) -> bool:
    try:
        return all(re.compile(pattern) for pattern in patterns)
    except re.error:
        return False


def _obstacle(entries: Sequence[Entry], patterns: Sequence[str]) -> tuple[str, str] | None:
    """Why these parameters cannot be frozen, and the fix; None: they can."""
    frozen = {entry.name: is_frozen(entry, patterns) for entry in entries}
    states: dict[tuple[int | None, str], set[bool]] = {}
    trained_layers = set()
    for entry in entries:
        found = [matches(name, patterns) for name in entry.hf]
        if len(set(found)) > 1:
            return (
                f"matches only some of {', '.join(entry.hf)}, which are one parameter in Megatron",
                "match all of them, or none",
            )
        if frozen[entry.name] and entry.row.where in ("embedding", "value"):
            why = f"matches {entry.hf[0]}, which has to be trained: gradients pass through it"
            return why, "choose patterns of layers, such as self_attn"
        base = entry.name.removesuffix("weight")
        if frozen[entry.name] and not frozen.get(f"{base}bias", True):
            why = f"matches {entry.hf[0]} without its bias: Megatron then computes neither gradient"
            return why, "match both, such as self_attn instead of self_attn.*weight"
        states.setdefault((entry.layer, entry.row.name), set()).add(frozen[entry.name])
        if not frozen[entry.name]:
            trained_layers.add(entry.layer)
    if any(len(both) > 1 for both in states.values()):
        return "matches only some experts of a layer", "match all of them, or none"
    whole = [layer for layer in {e.layer for e in entries} - trained_layers if layer is not None]
    if whole:
        why = f"freezes all of layer {min(whole)}: a pipeline stage would have nothing to train"
        return why, "leave a part of every layer trained, such as its norms"
    return None
