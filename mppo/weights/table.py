"""The parameter table: one row per parameter, the source of every transfer of weights.

A row gives a parameter's Megatron name (and its aliases in other layer specs), the names and shapes
of its Hugging Face tensors, their layout in the parameter, and the sharded dimension with its
group. ``docs/adding_a_family.md`` shows how to add rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from mppo.recipe.model_shape import ModelShape
from mppo.weights.blocks import Block, shard_blocks
from mppo.weights.table_rows import Row, Shape, model_rows

LAYER = "decoder.layers.{l}."
LAYER_NAME = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
"""Number of a layer in its chunk, and the name of a parameter inside it."""


@dataclass(frozen=True)
class Entry:
    """A row at one layer and expert: one parameter of the model, before sharding. Global indices
    from 0; None for rows outside layers or experts."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    @cached_property
    def name(self) -> str:
        prefix = "" if self.layer is None else LAYER.format(l=self.layer)
        return prefix + self.row.name.replace("{e}", str(self.expert))

    @cached_property
    def hf(self) -> tuple[str, ...]:
        return tuple(name.format(l=self.layer, e=self.expert) for name in self.row.hf)

    @property
    def cut_dim(self) -> int:
        """The sharded dimension, 0 for replicated rows; blocks are intervals along it."""
        return self.row.dim or 0

    def blocks(self, rank: int, size: int, groups: int, padded: int = 0) -> tuple[Block, ...]:
        """Blocks of shard ``rank`` of ``size`` in the row's group (ignored for replicated rows);
        ``padded`` is the vocabulary of ``vocab`` rows."""
        lengths = tuple(shape[self.cut_dim] for shape in self.row.shapes)
        if self.row.dim is None:
            rank, size = 0, 1
        return shard_blocks(self.row.kind, lengths, rank, size, groups, padded or lengths[0])

    def shard_shape(self, size: int, padded: int = 0) -> Shape:
        """Shape of one of ``size`` shards in Megatron."""
        dim, shapes = self.cut_dim, self.row.shapes
        total = padded if self.row.kind == "vocab" and padded else sum(s[dim] for s in shapes)
        cut = 1 if self.row.dim is None else size
        return (*shapes[0][:dim], total // cut, *shapes[0][dim + 1 :])


@dataclass(frozen=True)
class Table:
    shape: ModelShape
    rows: tuple[Row, ...]
    _by_name: dict[str, Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = {alias: row for row in self.rows for alias in (row.name, *row.aliases)}
        object.__setattr__(self, "_by_name", names)

    def applies(self, row: Row, layer: int) -> bool:
        """Return whether decoder layer ``layer`` has the parameter ``row``."""
        sparse = self.shape.sparse_layers[layer]
        return {"layer": True, "dense": not sparse, "sparse": sparse, "expert": sparse}.get(
            row.where, False
        )

    def layer_entries(self, layer: int) -> Iterator[Entry]:
        for row in self.rows:
            if self.applies(row, layer):
                if row.where == "expert":
                    yield from (Entry(row, layer, e) for e in range(self.shape.num_experts))
                else:
                    yield Entry(row, layer)

    def entries(self) -> Iterator[Entry]:
        """Every parameter of a causal language model; each Hugging Face tensor appears once."""
        yield from (Entry(row) for row in self.rows if row.where == "embedding")
        for layer in range(self.shape.num_layers):
            yield from self.layer_entries(layer)
        ends = [row for row in self.rows if row.where in ("final", "output")]
        yield from (Entry(row) for row in ends if row.alias_of is None)

    def stored_entries(self, is_stored: Callable[[Entry], bool]) -> Iterator[Entry]:
        """The entries to read from a model's files: a value model may lack the projection."""
        value = self.value_entry()
        has_value = is_stored(value)
        for entry in self.entries():
            if not (has_value and entry.row.where == "output" and not is_stored(entry)):
                yield entry
        if has_value:
            yield value

    def hf_shapes(self) -> dict[str, Shape]:
        """Shape of every Hugging Face tensor of the causal language model."""
        return {
            name: shape
            for entry in self.entries()
            for name, shape in zip(entry.hf, entry.row.shapes)
        }

    def value_entry(self) -> Entry:
        return next(Entry(row) for row in self.rows if row.where == "value")

    def projection_entry(self) -> Entry:
        """The vocabulary projection, whose tensor is the embeddings' where they are tied."""
        return next(Entry(row) for row in self.rows if row.where == "output")

    def find(self, name: str, layer: int | None, first_expert: int) -> Entry | None:
        """The entry of a parameter of a built stage, or None. Names inside a layer are relative to
        it; layer and expert have global indices."""
        name, expert = _without_expert(name)
        row = self._by_name.get(name)
        if row is None or (row.where == "expert") != (expert is not None):
            return None
        if layer is None:
            return None if row.where in ("layer", "dense", "sparse", "expert") else Entry(row)
        if not self.applies(row, layer):
            return None
        return Entry(row, layer, None if expert is None else first_expert + expert)


_SEQUENTIAL = re.compile(r"^(mlp\.experts\.local_experts\.)(\d+)(\..*)$")
_GROUPED = re.compile(r"^(mlp\.experts\.linear_fc[12]\.weight)(\d+)()$")


def _without_expert(name: str) -> tuple[str, int | None]:
    """The name with its expert's index replaced by ``{e}``, and that index."""
    found = _SEQUENTIAL.match(name) or _GROUPED.match(name)
    if found is None:
        return name, None
    return f"{found[1]}{{e}}{found[3]}", int(found[2])


def parameter_table(shape: ModelShape) -> Table:
    return Table(shape, model_rows(shape))
