"""A role's weights as slices for rollout ranks: each rank receives what it holds, and no more.

For each bucket of the plan, every training rank packs its pieces once, and one all-to-all brings
them to the ranks that host rollout ranks. With ``keep``, the packed bytes stay in memory until the
next update, which then sends only the blocks that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import model_shape
from mppo.weights.copies import copy_tensors
from mppo.weights.slices.message_bytes import (
    ALL_BLOCKS,
    BLOCK,
    adjacent_runs,
    block_message,
    message_bytes,
)
from mppo.weights.slices.reshard import ReshardPlanner
from mppo.weights.slices.slice_plan import Key, Piece, SlicePlan, SliceRequest, plan_slices
from mppo.weights.slots import Slot, find_slots
from mppo.weights.table import Entry, parameter_table

Pair = tuple[int, int]
"""A training rank and a rollout rank: the two ends of a message."""


@dataclass(frozen=True)
class Message:
    """The part of a bucket that one training rank sends to one rollout rank: ``blocks`` (or
    ``ALL_BLOCKS``) in uint8 ``content``, see ``block_message``."""

    pieces: tuple[Piece, ...]
    blocks: int
    content: Tensor


@dataclass(frozen=True)
class SliceBucket:
    """Messages for the rollout ranks this rank hosts, and checksums of the pieces of all ranks.
    ``empty``: no rank has changes in this bucket, and more buckets follow."""

    messages: dict[int, list[Message]]
    checks: dict[Key, tuple[int, int]]
    empty: bool


@dataclass
class SliceBytes:
    """Bytes of one update over all ranks: held by the rollout ranks; sent to them; of these, from
    another training rank than the host; least crossing if every block were sent; and crossing if
    every training rank gathered the full model."""

    total: int = 0
    sent: int = 0
    crossing: int = 0
    least: int = 0
    gathered: int = 0


@dataclass
class _Kept:
    """The bytes packed for the last update, by bucket number, and that update's version."""

    version: int | None = None
    packed: dict[int, Tensor] = field(default_factory=dict)


class SliceStream:
    """A role's weights as the slices that rollout ranks hold; constructing is collective. ``plan``
    is equal on every rank; ``bytes`` are of the last update."""

    def __init__(
        self, chunks: Sequence[Any], hf_config: Any, layout: Layout, request: SliceRequest
    ) -> None:
        self.request, self.bytes = request, SliceBytes()
        self._chunks, self._layout = chunks, layout
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._table = parameter_table(model_shape(hf_config))
        slots = self._find_slots()
        self._device = next(iter(slots.values())).tensor.device
        rows = {(s.entry.layer, s.entry.row.name): (s.tensor.dtype, s.size) for s in slots.values()}
        everyone = all_gather_objects(rows, layout.world)
        stage: dict[object, int] = {
            key[1] if key[0] is None else key[0]: layout.coordinates(rank).pp
            for rank, held in enumerate(everyone)
            for key in held
        }
        self._dtypes = {key: dtype for held in everyone for key, (dtype, _) in held.items()}
        uncut = {key[1] for held in everyone for key, (_, size) in held.items() if size == 1}
        planner = ReshardPlanner(
            self._table.shape,
            layout,
            stage,
            request.hosts,
            uncut_rows=uncut,
            expert_parallel=request.expert_parallel,
        )
        moves = [planner.plan(entry) for entry in self._table.entries()]
        self.plan = tuple(plan_slices(moves, self._table.shape, request, self._dtype))
        self._places = [plan.packed(self._rank) for plan in self.plan]
        self._of_plan = SliceBytes(
            total=sum(m.total * self._dtype(m.entry).itemsize for m in moves),
            least=sum(m.crossing * self._dtype(m.entry).itemsize for m in moves),
            gathered=sum(m.gathered * self._dtype(m.entry).itemsize for m in moves),
        )
        self._kept = _Kept()

    def _find_slots(self) -> dict[str, Slot]:
        here = self._layout.coordinates(self._rank)
        slots = find_slots(self._chunks, self._table, self._layout, here)
        return {slot.entry.name: slot for slot in slots}

    def _dtype(self, entry: Entry) -> torch.dtype:
        stored = self._dtypes[entry.layer, entry.row.name]
        return stored if entry.row.keep_fp32 else self.request.dtype

    def update(self, version: int, since: int | None) -> Iterator[SliceBucket]:
        """Send the current weights; yield the messages for rollout ranks hosted here. Collective.
        ``since`` is the version that every rollout rank holds; None: none, or different ones."""
        known = self._kept.packed if since is not None and since == self._kept.version else {}
        # until this update is complete, nothing may be compared with half of it
        self._kept = _Kept()
        self.bytes = replace(self._of_plan)
        slots = self._find_slots()
        for number in range(len(self.plan)):
            packed, own_checks = self._pack(number, slots)
            everyone = [own_checks]
            if self.request.checksum is not None:
                everyone = all_gather_objects(own_checks, self._layout.world)
            # pop: the old bytes of a bucket are freed as soon as they are compared
            messages, has_blocks = self._exchange(number, packed, known.pop(number, None))
            if self.request.keep:
                self._kept.packed[number] = packed
            checks = {key: check for part in everyone for key, check in part.items()}
            # the last bucket always goes to the servers, which take the new version from it
            more = number < len(self.plan) - 1
            yield SliceBucket(messages, checks, more and not checks and not has_blocks)
        self._kept.version = version

    def _pack(
        self, number: int, slots: dict[str, Slot]
    ) -> tuple[Tensor, dict[Key, tuple[int, int]]]:
        """This rank's pieces end to end (uint8), and their checksums."""
        places = self._places[number]
        size = sum(piece.padded_bytes for _, piece in places.values())
        # padding is compared too: it must be equal in every update
        flat = torch.zeros(size, dtype=torch.uint8, device=self._device)
        contents = {key: flat[at : at + piece.nbytes] for key, (at, piece) in places.items()}
        copy_tensors(
            (
                contents[key].view(piece.dtype).view(piece.shape),
                slots[name].tensor.narrow(piece.dim, offset, length),
            )
            for key, (_, piece) in places.items()
            for _, name, offset, length in [key]
        )
        if self.request.checksum is None:
            return flat, {}
        return flat, {key: self.request.checksum(content) for key, content in contents.items()}

    def _exchange(
        self, number: int, packed: Tensor, before: Tensor | None
    ) -> tuple[dict[int, list[Message]], bool]:
        """Bring every message to the host of its rollout rank; collective. ``before`` is what was
        packed last; None: send all bytes. Returns messages by rollout rank hosted here, and whether
        any rank sends a block."""
        plan, places = self.plan[number], self._places[number]
        sending: dict[int, tuple[int, Tensor]] = {}
        changed = None
        if before is not None:
            # as int64: a comparison of bytes would be eight times the work
            differs = packed.view(torch.int64) != before.view(torch.int64)
            changed = differs.view(-1, BLOCK // 8).any(1)
        for (source, slot), pieces in plan.pieces.items():
            if source == self._rank:
                spans = [(places[p.key][0], places[p.key][0] + p.padded_bytes) for p in pieces]
                sending[slot] = block_message(packed, changed, adjacent_runs(spans))
        # receivers must know the sizes: how many blocks changed is known to the sender only
        counts = self._counts(plan, sending, all_bytes=before is None)
        contents = self._all_to_all(plan, sending, counts)
        for pair in plan.pieces:
            nbytes = message_bytes(counts[pair], plan.sizes[pair])
            self.bytes.sent += nbytes
            self.bytes.crossing += nbytes if pair[0] != self.request.slots[pair[1]] else 0
        # a rollout rank without messages needs an entry too: a request has a payload for each rank
        received: dict[int, list[Message]] = {
            slot: [] for slot, host in enumerate(self.request.slots) if host == self._rank
        }
        for pair, content in contents.items():
            received[pair[1]].append(Message(plan.pieces[pair], counts[pair], content))
        return received, any(counts.values())

    def _counts(
        self, plan: SlicePlan, sending: dict[int, tuple[int, Tensor]], all_bytes: bool
    ) -> dict[Pair, int]:
        """Number of blocks of every message (or ``ALL_BLOCKS``), on every rank; collective."""
        if all_bytes:
            return dict.fromkeys(plan.pieces, ALL_BLOCKS)
        mine = torch.zeros(len(self.request.slots), dtype=torch.int64)
        for slot, (blocks, _) in sending.items():
            mine[slot] = blocks
        everyone = [mine]
        if self._layout.world > 1:
            everyone = [torch.empty_like(mine) for _ in range(self._layout.world)]
            dist.all_gather(everyone, mine)
        counts = torch.stack(everyone).tolist()
        return {(source, slot): counts[source][slot] for source, slot in plan.pieces}

    def _all_to_all(
        self, plan: SlicePlan, sending: dict[int, tuple[int, Tensor]], counts: dict[Pair, int]
    ) -> dict[Pair, Tensor]:
        """Contents of the messages for rollout ranks hosted here; collective."""
        hosts, world, me = self.request.slots, self._layout.world, self._rank
        # a message to a rollout rank hosted here stays in memory
        mine = {p: sending[p[1]][1] for p in plan.pieces if p[0] == me and hosts[p[1]] == me}
        if world == 1:
            return mine
        out = [p for p in plan.pieces if p[0] == me and hosts[p[1]] != me]
        # all_to_all_single sends one run of bytes to each rank, in rank order; the plan is sorted
        # by source, so the messages arrive in the order of ``into``
        out.sort(key=lambda pair: hosts[pair[1]])
        into = [p for p in plan.pieces if p[0] != me and hosts[p[1]] == me]
        sizes = {pair: message_bytes(counts[pair], plan.sizes[pair]) for pair in plan.pieces}
        out_sizes, in_sizes = [0] * world, [0] * world
        for pair in out:
            out_sizes[hosts[pair[1]]] += sizes[pair]
        for pair in into:
            in_sizes[pair[0]] += sizes[pair]
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = torch.cat([empty, *(sending[pair[1]][1] for pair in out)])
        received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, in_sizes, out_sizes)
        parts = received.split([sizes[pair] for pair in into])
        return {**mine, **dict(zip(into, parts))}


class SliceSource:
    """A role's weights as slices on request; equal requests share one plan. Collective calls."""

    def __init__(self, chunks: Sequence[Any], hf_config: Any, layout: Layout) -> None:
        self._chunks, self._hf_config, self._layout = chunks, hf_config, layout
        self._stream: SliceStream | None = None

    def __call__(self, request: SliceRequest) -> SliceStream:
        """The stream of a request; another request frees what the last stream kept."""
        if self._stream is None or self._stream.request != request:
            self._stream = SliceStream(self._chunks, self._hf_config, self._layout, request)
        return self._stream
