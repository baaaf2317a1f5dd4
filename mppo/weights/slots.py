"""Match the parameters of a built stage with the entries of the parameter table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mppo.parallel.layout import Coordinates, Layout
from mppo.safety.input_error import InputError
from mppo.weights.blocks import Block
from mppo.weights.table import LAYER_NAME, Entry, Table


@dataclass(frozen=True)
class Slot:
    """One entry's shard on this rank, a view of the module's storage, one of ``size``."""

    entry: Entry
    tensor: Tensor
    rank: int
    size: int

    def blocks(self, groups: int) -> tuple[Block, ...]:
        """The shard's blocks; ``groups`` is the number of key-value heads."""
        padded = self.tensor.shape[0] * self.size if self.entry.row.kind == "vocab" else 0
        return self.entry.blocks(self.rank, self.size, groups, padded)


def find_slots(
    chunks: Sequence[Any], table: Table, layout: Layout, coordinates: Coordinates
) -> list[Slot]:
    """Match every parameter of this rank's chunks with the table: one slot per parameter (per
    expert inside grouped layers), in the table's order.

    Raises:
        InputError: the table lacks a parameter, the stage lacks an entry, or a shape differs.
    """
    first_expert = coordinates.ep * (table.shape.num_experts // layout.ep)
    slots: list[Slot] = []
    for chunk in chunks:
        numbers = [module.layer_number - 1 for module in chunk.decoder.layers]
        for name, tensor in _tensors(chunk):
            inside = LAYER_NAME.match(name)
            layer = numbers[int(inside[1])] if inside else None
            relative = inside[2] if inside else name
            entry = table.find(relative, layer, first_expert)
            if entry is None:
                raise InputError(
                    f"the {table.shape.model_type} table has no parameter {name} "
                    f"(layer {layer}); the stage was built for another architecture"
                )
            slots.append(_slot(entry, tensor, layout, coordinates, name))
    _check_complete(slots, table, layout, first_expert)
    return slots


def _tensors(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the router's bias; legacy grouped experts as one tensor per expert."""
    for name, parameter in chunk.named_parameters():
        if name.endswith((".mlp.experts.weight1", ".mlp.experts.weight2")):
            yield from _legacy_experts(chunk, name, parameter.data)
        else:
            yield name, parameter.data
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _legacy_experts(chunk: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts of Megatron's ``GroupedMLP``, which stores them transposed in one matrix."""
    experts = chunk.get_submodule(name.rpartition(".")[0])
    count, hidden = experts.num_local_experts, experts.config.hidden_size
    first = name.endswith("1")
    stacked = weight.view(count, hidden, -1) if first else weight.view(count, -1, hidden)
    layer = "linear_fc1" if first else "linear_fc2"
    base = name.rpartition(".")[0]
    for expert in range(count):
        yield f"{base}.local_experts.{expert}.{layer}.weight", stacked[expert].t()


def _slot(
    entry: Entry, tensor: Tensor, layout: Layout, coordinates: Coordinates, name: str
) -> Slot:
    row = entry.row
    expert = row.group == "etp"
    rank, size = (coordinates.etp, layout.etp) if expert else (coordinates.tp, layout.tp)
    if row.dim is None:
        rank, size = 0, 1
    padded = tensor.shape[0] * size if row.kind == "vocab" else 0
    if size > 1 and tuple(tensor.shape) == entry.shard_shape(1):
        # Transformer Engine's spec replicates MLA's down projections
        rank, size = 0, 1
    shape = entry.shard_shape(size, padded)
    if tuple(tensor.shape) != shape or (padded and padded < row.shapes[0][0]):
        raise InputError(
            f"{name}: the stage has shape {list(tensor.shape)}, config.json says {list(shape)} "
            f"for shard {rank} of {size}"
        )
    return Slot(entry, tensor, rank, size)


def _check_complete(slots: list[Slot], table: Table, layout: Layout, first_expert: int) -> None:
    held = [slot.entry.name for slot in slots]
    if len(set(held)) != len(held):
        twice = next(name for name in held if held.count(name) > 1)
        raise InputError(f"the stage holds {twice} twice")
    last_expert = first_expert + table.shape.num_experts // layout.ep
    names = set(held)
    for layer in sorted({slot.entry.layer for slot in slots if slot.entry.layer is not None}):
        for entry in table.layer_entries(layer):
            local = entry.expert is None or first_expert <= entry.expert < last_expert
            if local and entry.name not in names:
                raise InputError(f"the stage lacks {entry.name}, which the architecture has")


def assert_partition(chunks: Sequence[Any], slots: Sequence[Slot]) -> None:
    """Assert that the table's sharded dimensions equal those in Megatron's parameter attributes;
    not of experts, as grouped layers do not set these."""
    by_storage = {slot.tensor.data_ptr(): slot for slot in slots if slot.tensor.numel()}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            slot = by_storage.get(parameter.data_ptr())
            if slot is None or slot.entry.row.group == "etp" or slot.size == 1:
                continue
            if getattr(parameter, "tensor_model_parallel", False):
                assert parameter.partition_dim == slot.entry.row.dim, (
                    f"{name}: Megatron cuts dimension {parameter.partition_dim}, the table "
                    f"{slot.entry.row.dim}"
                )
