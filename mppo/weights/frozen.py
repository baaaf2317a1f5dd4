"""The parameters that a recipe freezes: regular expressions over Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mppo.weights.table import LAYER_NAME, Entry, Table

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
