"""The parameters that a recipe freezes: regular expressions over Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mppo.recipe.errors import ConfigIssue, nearest
from mppo.recipe.model_shape import ModelShape
from mppo.weights.table import LAYER_NAME, Entry, Table, parameter_table

_LEGACY_EXPERTS = {
    "mlp.experts.weight1": "mlp.experts.local_experts.0.linear_fc1.weight",
    "mlp.experts.weight2": "mlp.experts.local_experts.0.linear_fc2.weight",
}
"""Parameters of Megatron's ``GroupedMLP``, each of all experts, as the first expert's."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern occurs in a Hugging Face name, as ``re.search`` finds it."""
    return any(re.search(pattern, name) for pattern in patterns)


def is_frozen(entry: Entry, patterns: Sequence[str]) -> bool:
    """Whether the patterns match every tensor of a parameter."""
    return bool(patterns) and all(matches(name, patterns) for name in entry.hf)


def value_model_entries(table: Table) -> Iterator[Entry]:
    """Every parameter of a model with a value head."""
    yield from (entry for entry in table.entries() if entry.row.where != "output")
    yield table.value_entry()


def freeze_issues(shape: ModelShape, patterns: Sequence[str]) -> Iterator[ConfigIssue]:
    """Issues of ``critic.freeze``: a pattern that matches no name of the critic, only a part of a
    parameter, or what has to be trained."""
    entries = list(value_model_entries(parameter_table(shape)))
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


def freeze_parameters(chunks: Sequence[Any], table: Table, patterns: Sequence[str]) -> None:
    """Do not train the parameters whose Hugging Face names the patterns match, all experts of a
    layer together. Call it before DDP and the optimizer are made: both then leave them out."""
    for chunk in chunks:
        numbers = [module.layer_number - 1 for module in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            inside = LAYER_NAME.match(name)
            layer = numbers[int(inside[1])] if inside else None
            relative = inside[2] if inside else name
            entry = table.find(_LEGACY_EXPERTS.get(relative, relative), layer, 0)
            assert entry is not None, f"the weights' names have been checked: {name}"
            if is_frozen(entry, patterns):
                parameter.requires_grad_(False)
