"""Keys and leading indices of the table's entries in Megatron's checkpoints.

Models whose layers are all alike have one key per parameter, with the layer as leading dimension.
Models with experts have one key per layer, with the layer's experts as leading dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mppo.weights.table import Entry, Table
from mppo.weights.table_rows import Row

LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.local_experts.{e}."
CHECKPOINT_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class Place:
    """Possible keys of an entry, and its leading indices: (index, size) per leading dimension.
    ``single_key`` is that of checkpoints that store each expert separately, with one index less."""

    keys: tuple[str, ...]
    leading: tuple[tuple[int, int], ...]
    single_key: str | None = None


def is_homogeneous(table: Table) -> bool:
    """Whether all layers share keys (no experts in the model)."""
    return not any(table.shape.sparse_layers)


def place(entry: Entry, table: Table, homogeneous: bool, prefix: str = "") -> Place:
    """Return the keys and leading indices of an entry; ``homogeneous``: layers share keys."""
    row, leading = entry.row, []
    start = prefix
    if entry.layer is not None:
        start += LAYERS if homogeneous else f"{LAYERS}{entry.layer}."
        if homogeneous:
            leading.append((entry.layer, table.shape.num_layers))
    if entry.expert is not None:
        leading.append((entry.expert, table.shape.num_experts))
    single = None
    if entry.expert is not None:
        own = row.name.replace(EXPERTS, f"{CHECKPOINT_EXPERTS}{entry.expert}.")
        single = start + own
    return Place(tuple(start + name for name in names(row)), tuple(leading), single)


def names(row: Row) -> tuple[str, ...]:
    if row.where == "expert":
        return (row.name.replace(EXPERTS, CHECKPOINT_EXPERTS),)
    return (row.name, *row.aliases)


def extra_states(table: Table, homogeneous: bool) -> Iterator[str]:
    """Yield keys of the empty extra states of Megatron's linear and attention modules."""
    for layer in range(table.shape.num_layers):
        rows = [row for row in table.rows if table.applies(row, layer)]
        modules = {
            (name.removesuffix(".weight"), row.where == "expert")
            for row in rows
            for name in names(row)
            if ".linear_" in name and name.endswith(".weight")
        }
        modules.add(("self_attention.core_attention", False))
        for module, expert in sorted(modules):
            # Megatron shards the state like the weights: by layer (if keys are shared) and expert
            for number in range(table.shape.num_experts if expert else 1):
                leading = [(layer, table.shape.num_layers)] if homogeneous else []
                leading += [(number, table.shape.num_experts)] if expert else []
                start = LAYERS if homogeneous else f"{LAYERS}{layer}."
                yield f"{start}{module}._extra_state/{_shard(leading)}"


def _shard(leading: list[tuple[int, int]]) -> str:
    places = leading or [(0, 1)]
    index = ".".join(str(i) for i, _ in places)
    size = ".".join(str(n) for _, n in places)
    return f"shard_{index}_{size}"
