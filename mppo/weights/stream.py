"""A role's weights as whole Hugging Face tensors, bucket by bucket, the same on every rank.

The plan is arithmetic: which entries share a bucket, the bucket's layout, and the pipeline stage
that owns it. A bucket then costs one all-gather over TP, one over ETP and EP if it holds experts,
and one broadcast over PP, for any number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import model_shape
from mppo.weights.blocks import ZERO
from mppo.weights.bucket import BucketLayout, WeightBucket, aligned
from mppo.weights.copies import BufferCopy, Slice, copy_tensors, folded, slice_copy
from mppo.weights.slots import Slot, find_slots
from mppo.weights.table import Entry, Table, parameter_table
from mppo.weights.table_rows import Row

if TYPE_CHECKING:  # it imports Megatron, which a plan does not need
    from mppo.parallel.groups import LayoutGroups


@dataclass(frozen=True)
class Unit:
    """Entries that must be in the same bucket, all on one pipeline stage. ``expert`` is a local
    expert index: the unit holds that expert of every expert-parallel rank. None: no experts."""

    stage: int
    entries: tuple[Entry, ...]
    expert: int | None = None


@dataclass(frozen=True)
class BucketPlan:
    """Units of one stage, and the layout of their Hugging Face tensors; ``copies`` lead from
    gathered shards to the bucket, by the name of the gather, and are made at its first assembly."""

    stage: int
    units: tuple[Unit, ...]
    layout: BucketLayout
    copies: dict[str, list[BufferCopy]] = field(default_factory=dict)


class WeightStream:
    """Every tensor of the model under its Hugging Face name, bucket by bucket.

    Constructing plans the buckets; collective over the pipeline. Iterating yields them with the
    parameters' current values, equal on every rank, on the model's device; collective over the
    role. It can be repeated. A tied output projection is left out; a value head is included. A unit
    larger than ``bucket_bytes`` gets a bucket of its own.
    """

    def __init__(
        self, chunks: Sequence[Any], hf_config: Any, groups: LayoutGroups, bucket_bytes: int
    ) -> None:
        self.table = parameter_table(model_shape(hf_config))
        self.groups, self.layout, self.coordinates = groups, groups.layout, groups.coordinates
        self.chunks = chunks
        slots = find_slots(chunks, self.table, self.layout, self.coordinates)
        held = [(s.entry.row.where, s.entry.layer, s.entry.row.name, s.tensor.dtype) for s in slots]
        stages = all_gather_objects(held, self.layout.pp, groups.pp)
        self._dtypes = {(layer, row): stored for stage in stages for _, layer, row, stored in stage}
        units = plan_units(self.table, self.layout, owners(stages))
        cut = cut_buckets(units, bucket_bytes, lambda entry: self._dtype(entry).itemsize)
        self._buckets = tuple(map(self._bucket_plan, cut))

    def __iter__(self) -> Iterator[WeightBucket]:
        # a parameter's tensor may be another one now, such as its moving average
        slots = find_slots(self.chunks, self.table, self.layout, self.coordinates)
        self.slots: dict[str, Slot] = {slot.entry.name: slot for slot in slots}
        self.device = slots[0].tensor.device
        return map(self._gather, self._buckets)

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of everything that will be streamed, in order."""
        return {
            place.name: (place.dtype, place.shape)
            for bucket in self._buckets
            for place in bucket.layout.places
        }

    def _gather(self, plan: BucketPlan) -> WeightBucket:
        """Assemble one bucket; collective over the role, in the order of the plan."""
        content = torch.empty(plan.layout.nbytes, dtype=torch.uint8, device=self.device)
        bucket = WeightBucket(plan.layout, content)
        if plan.stage == self.coordinates.pp:
            with torch.no_grad():
                self._assemble(plan, bucket)
        if self.layout.pp > 1:
            assert self.groups.pp is not None
            source = dist.get_global_rank(self.groups.pp, plan.stage)
            dist.broadcast(content, source, group=self.groups.pp)
        return bucket

    def _dtype(self, entry: Entry) -> torch.dtype:
        return self._dtypes[entry.layer, entry.row.name]

    def _bucket_plan(self, units: list[Unit]) -> BucketPlan:
        layout = BucketLayout.plan(
            (name, self._dtype(entry), shape)
            for unit in units
            for entry in unit.entries
            for name, shape in zip(entry.hf, entry.row.shapes)
        )
        return BucketPlan(units[0].stage, tuple(units), layout)

    def _assemble(self, plan: BucketPlan, bucket: WeightBucket) -> None:
        """Fill a bucket of this stage; collective over the stage."""
        plain = [e for unit in plan.units if unit.expert is None for e in unit.entries]
        slots = [self.slots[entry.name] for entry in plain]
        tensors = dict(bucket)
        copy_tensors(
            pair for slot in slots if slot.size == 1 for pair in self._blocks(slot, tensors)
        )
        cut = [slot for slot in slots if slot.size > 1]
        if cut:
            # one all-gather for all sharded tensors of the bucket
            packed, firsts = self._pack(cut)
            gathered = _all_gather(packed, self.groups.tp, self.layout.tp)
            shards = (
                (slot, slot.entry, rank, rank * len(packed) + first)
                for rank in range(self.layout.tp)
                for slot, first in zip(cut, firsts)
            )
            self._unpack("tensor parallel", gathered, shards, plan, bucket)
        experts = [unit for unit in plan.units if unit.expert is not None]
        if experts:
            self._assemble_experts(experts, plan, bucket)

    def _assemble_experts(self, units: list[Unit], plan: BucketPlan, bucket: WeightBucket) -> None:
        ep, etp = self.layout.ep, self.layout.etp
        per_rank = self.table.shape.num_experts // ep
        own = [self.slots[e.name] for u in units for e in u.entries if e.name in self.slots]
        packed, firsts = self._pack(own)
        gathered = _all_gather(packed, self.groups.etp, etp)
        gathered = _all_gather(gathered, self.groups.ep, ep)

        def shards() -> Iterator[tuple[Slot, Entry, int, int]]:
            for number in range(ep * etp):
                # every rank packs the same local experts, so only the global index differs
                shift = (number // etp - self.coordinates.ep) * per_rank
                for slot, first in zip(own, firsts):
                    assert slot.entry.expert is not None
                    entry = replace(slot.entry, expert=slot.entry.expert + shift)
                    yield slot, entry, number % etp, number * len(packed) + first

        self._unpack("expert parallel", gathered, shards(), plan, bucket)

    def _pack(self, slots: list[Slot]) -> tuple[Tensor, list[int]]:
        """This rank's shards, end to end (uint8), and the first byte of each."""
        layout = BucketLayout.plan(
            (slot.entry.name, self._dtype(slot.entry), slot.tensor.shape) for slot in slots
        )
        flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        copy_tensors((place.view(flat), slot.tensor) for place, slot in zip(layout.places, slots))
        return flat, [place.start for place in layout.places]

    def _blocks(self, slot: Slot, tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The places of an unsharded parameter's blocks in ``tensors``, and the blocks."""
        offset, dim = 0, slot.entry.cut_dim
        for block in slot.blocks(self.table.shape.kv_heads):
            if block.source != ZERO:
                target = tensors[slot.entry.hf[block.source]]
                into = target.narrow(dim, block.start, block.length)
                yield into, slot.tensor.narrow(dim, offset, block.length)
            offset += block.length

    def _unpack(
        self,
        gather: str,
        gathered: Tensor,
        shards: Iterable[tuple[Slot, Entry, int, int]],
        plan: BucketPlan,
        bucket: WeightBucket,
    ) -> None:
        """Copy the blocks of shards to their places in a bucket. ``gathered`` is uint8, what
        ``_pack`` returned on several ranks; a shard is this rank's slot, the parameter on the other
        rank, that rank's index in the slot's group, and its first byte in ``gathered``."""
        if gather not in plan.copies:
            plan.copies[gather] = folded(self._copies(shards, plan.layout))
        for copy in plan.copies[gather]:
            copy.run(gathered, bucket.content)

    def _copies(
        self, shards: Iterable[tuple[Slot, Entry, int, int]], layout: BucketLayout
    ) -> Iterator[BufferCopy]:
        places = {place.name: place for place in layout.places}
        for slot, entry, rank, first in shards:
            shape, dim, offset = tuple(slot.tensor.shape), entry.cut_dim, 0
            padded = shape[0] * slot.size if entry.row.kind == "vocab" else 0
            for block in entry.blocks(rank, slot.size, self.table.shape.kv_heads, padded):
                if block.source != ZERO:
                    place = places[entry.hf[block.source]]
                    source = Slice(first, shape, offset)
                    target = Slice(place.start, place.shape, block.start)
                    yield slice_copy(source, target, dim, block.length, place.dtype.itemsize)
                offset += block.length


def owners(stages: Sequence[Sequence[tuple]]) -> dict[Any, int]:
    """Stage of each layer (by its index) and of each parameter outside layers (by row name)."""
    return {
        (layer if layer is not None else row): stage
        for stage, held in enumerate(stages)
        for where, layer, row, _ in held
    }


def plan_units(table: Table, layout: Layout, owner: dict[Any, int]) -> Iterator[Unit]:
    """The model's units in order, each Hugging Face tensor in exactly one."""
    for row in table.rows:
        if row.where == "embedding":
            yield Unit(owner[row.name], (Entry(row),))
    for layer in range(table.shape.num_layers):
        yield from _layer_units(table, layout, layer, owner[layer])
    for row in table.rows:
        if row.where in ("final", "output", "value") and row.alias_of is None and row.name in owner:
            yield Unit(owner[row.name], (Entry(row),))


def cut_buckets(
    units: Iterable[Unit], bucket_bytes: int, itemsize: Callable[[Entry], int]
) -> Iterator[list[Unit]]:
    """Cut units into buckets, each of one stage, with at most ``bucket_bytes`` or one unit."""
    bucket: list[Unit] = []
    total = 0
    for unit in units:
        nbytes = sum(exported_bytes(entry, itemsize) for entry in unit.entries)
        if bucket and (bucket[0].stage != unit.stage or total + nbytes > bucket_bytes):
            yield bucket
            bucket, total = [], 0
        bucket.append(unit)
        total += nbytes
    yield bucket


def exported_bytes(entry: Entry, itemsize: Callable[[Entry], int]) -> int:
    """Bytes of a parameter's Hugging Face tensors in a bucket."""
    return sum(aligned(math.prod(shape) * itemsize(entry)) for shape in entry.row.shapes)


def _layer_units(table: Table, layout: Layout, layer: int, stage: int) -> Iterator[Unit]:
    rows = [row for row in table.rows if table.applies(row, layer)]
    fused: dict[str, list[Row]] = {}
    for row in rows:
        if row.where != "expert":
            fused.setdefault(row.fuse_group or row.name, []).append(row)
    for together in fused.values():
        yield Unit(stage, tuple(Entry(row, layer) for row in together))
    expert_rows = [row for row in rows if row.where == "expert"]
    if not expert_rows:
        return
    per_rank = table.shape.num_experts // layout.ep
    for local in range(per_rank):
        experts = range(local, table.shape.num_experts, per_rank)
        yield Unit(stage, tuple(Entry(r, layer, e) for e in experts for r in expert_rows), local)


def _all_gather(flat: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    if size == 1:
        return flat
    out = torch.empty(size * len(flat), dtype=flat.dtype, device=flat.device)
    dist.all_gather_into_tensor(out, flat, group=group)
    return out
