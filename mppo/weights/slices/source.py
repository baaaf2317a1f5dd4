"""What each rollout rank holds of a model, sent to it and no further: the plan and its execution.

A bucket of the plan says which pieces of which parameters go from which training rank to which
rollout rank. Executing it packs this rank's pieces once, and brings them to the ranks that host
rollout ranks by one all-to-all. With ``keep``, what was packed stays in memory until the next
update, and only blocks that differ from it are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.layout import Layout
from mppo.weights.shape import model_shape
from mppo.weights.slices.engine_tensors import EngineTensor, engine_tensor
from mppo.weights.slices.reshard import Reshard, plan_reshard
from mppo.weights.slots import find_slots
from mppo.weights.table import Entry, parameter_table

BLOCK = 32
"""Bytes that are compared, and sent, together: 16 elements of bfloat16."""
WHOLE = -1
INDEX_BYTES = 4

Key = tuple[int, str, int, int]
"""A piece of what a training rank holds: the rank, the entry, offset and length in its shard."""


@dataclass(frozen=True)
class SliceRequest:
    """What a rollout engine asks for; the same on every rank.

    Args:
        hosts: for each engine, the training rank beside each of its tensor ranks.
        dtype: type of the engine's weights.
        bucket_bytes: most bytes for one of its ranks in a bucket.
        keep: hold on to what was sent, so that the next update may leave out what did not change.
        checksum: of a piece's bytes, to send along; None: send none.
        expert_parallel: groups of an engine's ranks that share the experts out.
    """

    hosts: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    bucket_bytes: int
    keep: bool = False
    checksum: Callable[[Tensor], tuple[int, int]] | None = None
    expert_parallel: int = 1

    @property
    def slots(self) -> tuple[int, ...]:
        """Host of every rollout rank, counted over the engines."""
        return tuple(host for engine in self.hosts for host in engine)


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter of a rollout rank.

    Args:
        target: the parameter.
        dim: dimension the stretch runs along (an expert's, where it is one).
        offset: where it begins there.
        shape: its shape; its length is the extent along ``dim``.
        dtype: as it is sent.
        begin: its first byte in the message, a multiple of ``BLOCK``.
        key: what the training rank packs for it.
    """

    target: EngineTensor
    dim: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    key: Key

    @property
    def nbytes(self) -> int:
        """Bytes, padding left out."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SlicePlan:
    """One bucket: pieces by (training rank, rollout rank), each list one message."""

    pieces: dict[tuple[int, int], tuple[Piece, ...]]

    @cached_property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Bytes of each message with nothing left out."""
        return {pair: _end(pieces[-1]) for pair, pieces in self.pieces.items()}

    def packed(self, source: int) -> dict[Key, tuple[int, Piece]]:
        """Where each distinct piece of a training rank lies in what it packs."""
        found: dict[Key, tuple[int, Piece]] = {}
        at = 0
        for (rank, _), pieces in self.pieces.items():
            for piece in pieces if rank == source else ():
                if piece.key not in found:
                    found[piece.key] = (at, piece)
                    at += _aligned(piece.nbytes)
        return found


@dataclass(frozen=True)
class Message:
    """What one training rank tells one rollout rank of one bucket.

    Args:
        pieces: what it is about.
        blocks: number of blocks that follow; ``WHOLE``: all bytes, without indices.
        content: uint8; the blocks' numbers in the message (int32, padded to ``BLOCK``), then they.
    """

    pieces: tuple[Piece, ...]
    blocks: int
    content: Tensor


@dataclass(frozen=True)
class SliceBucket:
    """Messages for the rollout ranks this rank hosts, and checksums of all their pieces.

    ``empty``: on no rank is anything to be told, and more buckets follow.
    """

    messages: dict[int, list[Message]]
    checks: dict[Key, tuple[int, int]]
    empty: bool


@dataclass
class SliceBytes:
    """Bytes of one update over all ranks.

    Args:
        total: what the rollout ranks hold.
        sent: what they were sent.
        crossing: of these, what came from another training rank than their host's.
        least: what must cross so when nothing is left out.
        gathered: what would cross were every training rank brought the whole model.
    """

    total: int = 0
    sent: int = 0
    crossing: int = 0
    least: int = 0
    gathered: int = 0


@dataclass
class _Kept:
    """What was packed for the last update, bucket by bucket."""

    version: int | None = None
    packed: dict[int, Tensor] = field(default_factory=dict)


class SliceStream:
    """A role's weights as the pieces that rollout ranks hold; constructing is collective.

    Args:
        chunks: this rank's ``GPTModel`` chunks.
        hf_config: the model's transformers config.
        layout: the role's layout.
        request: what is asked for.

    Attributes:
        plan: the buckets, equal on every rank.
        bytes: of the last update.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        hf_config: Any,
        layout: Layout,
        request: SliceRequest,
    ) -> None:
        self.request, self.bytes = request, SliceBytes()
        self._chunks, self._layout = chunks, layout
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._table = parameter_table(model_shape(hf_config))
        slots = self._find()
        self._device = next(iter(slots.values())).tensor.device
        rows = {(s.entry.layer, s.entry.row.name): (s.tensor.dtype, s.size) for s in slots.values()}
        everyone = all_gather_objects(rows, layout.world)
        stage = {
            key[1] if key[0] is None else key[0]: layout.coordinates(rank).pp
            for rank, held in enumerate(everyone)
            for key in held
        }
        self._dtypes = {key: dtype for held in everyone for key, (dtype, _) in held.items()}
        whole = {key[1] for held in everyone for key, (_, size) in held.items() if size == 1}
        cut = {"whole": whole, "expert_parallel": request.expert_parallel}
        moves = list(plan_reshard(self._table, layout, stage, request.hosts, **cut))
        self.plan = tuple(self._buckets(moves, request.bucket_bytes))
        self._places = [plan.packed(self._rank) for plan in self.plan]
        self._of_plan = SliceBytes(
            total=sum(m.total * self._dtype(m.entry).itemsize for m in moves),
            least=sum(m.crossing * self._dtype(m.entry).itemsize for m in moves),
            gathered=sum(m.gathered * self._dtype(m.entry).itemsize for m in moves),
        )
        self._kept = _Kept()

    def _find(self) -> dict[str, Any]:
        here = self._layout.coordinates(self._rank)
        slots = find_slots(self._chunks, self._table, self._layout, here)
        return {slot.entry.name: slot for slot in slots}

    def _dtype(self, entry: Entry) -> torch.dtype:
        stored = self._dtypes[entry.layer, entry.row.name]
        return stored if entry.row.keep_fp32 else self.request.dtype

    def _buckets(self, moves: Sequence[Reshard], bucket_bytes: int) -> Iterator[SlicePlan]:
        found: dict[tuple[int, int], list[Piece]] = {}
        filled = [0] * len(self.request.slots)
        for reshard in moves:
            new = self._pieces(reshard)
            added = [0] * len(filled)
            for _, slot, piece in new:
                added[slot] += _aligned(piece.nbytes)
            if found and max(a + b for a, b in zip(filled, added)) > bucket_bytes:
                yield SlicePlan({pair: tuple(found[pair]) for pair in sorted(found)})
                found, filled = {}, [0] * len(filled)
            filled = [a + b for a, b in zip(filled, added)]
            for source, slot, piece in new:
                message = found.setdefault((source, slot), [])
                begin = _end(message[-1]) if message else 0
                message.append(replace(piece, begin=begin))
        yield SlicePlan({pair: tuple(found[pair]) for pair in sorted(found)})

    def _pieces(self, reshard: Reshard) -> list[tuple[int, int, Piece]]:
        """An entry's pieces, with the ranks they are from and for."""
        entry, dim = reshard.entry, reshard.entry.cut_dim
        ranks = [(i, len(engine)) for engine in self.request.hosts for i in range(len(engine))]
        model, experts = self._table.shape, self.request.expert_parallel
        pieces = []
        for move in reshard.moves:
            target = engine_tensor(entry, model, *ranks[move.slot], expert_parallel=experts)
            whole = entry.row.shapes[0]
            shape = (*whole[:dim], move.length, *whole[dim + 1 :])
            at = target.first + move.destination_offset
            key = (move.source, entry.name, move.source_offset, move.length)
            piece = Piece(target, dim, at, shape, self._dtype(entry), 0, key)
            pieces.append((move.source, move.slot, piece))
        return pieces

    def update(self, version: int, since: int | None) -> Iterator[SliceBucket]:
        """Send the current weights; collective.

        Args:
            version: of these weights.
            since: version that every rollout rank asking holds; None: some hold none.

        Yields:
            What arrived here for the rollout ranks this rank hosts.
        """
        known = self._kept.packed if since is not None and since == self._kept.version else {}
        self._kept = _Kept()
        self.bytes = replace(self._of_plan)
        slots = self._find()
        for number in range(len(self.plan)):
            packed, checks = self._pack(number, slots)
            everyone = [checks]
            if self.request.checksum is not None:
                everyone = all_gather_objects(checks, self._layout.world)
            messages, blocks = self._exchange(number, packed, known.pop(number, None))
            if self.request.keep:
                self._kept.packed[number] = packed
            told = {key: check for part in everyone for key, check in part.items()}
            more = number < len(self.plan) - 1
            yield SliceBucket(messages, told, more and not told and not blocks)
        self._kept.version = version

    @torch.no_grad()
    def _pack(
        self, number: int, slots: dict[str, Any]
    ) -> tuple[Tensor, dict[Key, tuple[int, int]]]:
        """This rank's pieces as one run of bytes, and their checksums."""
        places = self._places[number]
        size = sum(_aligned(piece.nbytes) for _, piece in places.values())
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        checks = {}
        for key, (at, piece) in places.items():
            _, name, offset, length = key
            content = flat[at : at + piece.nbytes]
            part = slots[name].tensor.narrow(piece.dim, offset, length)
            content.view(piece.dtype).view(piece.shape).copy_(part)
            flat[at + piece.nbytes : at + _aligned(piece.nbytes)].zero_()
            if self.request.checksum is not None:
                checks[key] = self.request.checksum(content)
        return flat, checks

    def _exchange(
        self, number: int, packed: Tensor, before: Tensor | None
    ) -> tuple[dict[int, list[Message]], bool]:
        """Bring every message to its rollout rank's host; whether any has blocks."""
        plan, places = self.plan[number], self._places[number]
        sending: dict[int, tuple[int, Tensor]] = {}
        changed = None
        if before is not None:
            differs = packed.view(torch.int64) != before.view(torch.int64)
            changed = differs.view(-1, BLOCK // 8).any(1)
        for pair, pieces in plan.pieces.items():
            if pair[0] == self._rank:
                runs = _runs([places[piece.key][0] for piece in pieces], pieces)
                sending[pair[1]] = block_message(packed, changed, runs)
        counts = self._counts(plan, sending, before is None)
        contents = self._all_to_all(plan, sending, counts)
        for pair in plan.pieces:
            nbytes = _message_bytes(counts[pair], plan.sizes[pair])
            self.bytes.sent += nbytes
            self.bytes.crossing += nbytes if pair[0] != self.request.slots[pair[1]] else 0
        received: dict[int, list[Message]] = {
            slot: [] for slot, host in enumerate(self.request.slots) if host == self._rank
        }
        for pair, content in contents.items():
            received[pair[1]].append(Message(plan.pieces[pair], counts[pair], content))
        return received, any(counts.values())

    def _counts(
        self, plan: SlicePlan, sending: dict[int, tuple[int, Tensor]], whole: bool
    ) -> dict[tuple[int, int], int]:
        """Blocks of every message, on every rank."""
        if whole:
            return dict.fromkeys(plan.pieces, WHOLE)
        mine = torch.zeros(len(self.request.slots), dtype=torch.int64, device=self._device)
        for slot, (blocks, _) in sending.items():
            mine[slot] = blocks
        everyone = [mine]
        if self._layout.world > 1:
            everyone = [torch.empty_like(mine) for _ in range(self._layout.world)]
            dist.all_gather(everyone, mine)
        told = torch.stack(everyone).tolist()
        return {(source, slot): told[source][slot] for source, slot in plan.pieces}

    def _all_to_all(
        self,
        plan: SlicePlan,
        sending: dict[int, tuple[int, Tensor]],
        counts: dict[tuple[int, int], int],
    ) -> dict[tuple[int, int], Tensor]:
        """Contents of the messages for slots hosted here; own ones do not travel."""
        hosts, world, me = self.request.slots, self._layout.world, self._rank
        mine = {p: sending[p[1]][1] for p in plan.pieces if p[0] == me and hosts[p[1]] == me}
        if world == 1:
            return mine
        out = [p for p in plan.pieces if p[0] == me and hosts[p[1]] != me]
        out.sort(key=lambda pair: hosts[pair[1]])
        into = [p for p in plan.pieces if p[0] != me and hosts[p[1]] == me]
        sizes = {pair: _message_bytes(counts[pair], plan.sizes[pair]) for pair in plan.pieces}
        given, taken = [0] * world, [0] * world
        for pair in out:
            given[hosts[pair[1]]] += sizes[pair]
        for pair in into:
            taken[pair[0]] += sizes[pair]
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = torch.cat([empty, *(sending[pair[1]][1] for pair in out)])
        received = torch.empty(sum(taken), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, taken, given)
        parts = received.split([sizes[pair] for pair in into])
        return {**mine, **dict(zip(into, parts))}


class SliceSource:
    """A role's weights as pieces on request, planned once for requests that are equal.

    Args: as of ``SliceStream``. Calls are collective.
    """

    def __init__(self, chunks: Sequence[Any], hf_config: Any, layout: Layout) -> None:
        self._chunks, self._hf_config, self._layout = chunks, hf_config, layout
        self._stream: SliceStream | None = None

    def __call__(self, request: SliceRequest) -> SliceStream:
        """The stream of a request; what an earlier one kept for another request is let go."""
        if self._stream is None or self._stream.request != request:
            self._stream = SliceStream(self._chunks, self._hf_config, self._layout, request)
        return self._stream


def _aligned(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _end(piece: Piece) -> int:
    return piece.begin + _aligned(piece.nbytes)


def _message_bytes(blocks: int, whole: int) -> int:
    return whole if blocks == WHOLE else _aligned(blocks * INDEX_BYTES) + blocks * BLOCK


def _runs(begins: Sequence[int], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where a message's pieces lie, neighbours as one: first byte and the one after the last."""
    runs: list[tuple[int, int]] = []
    for begin, piece in zip(begins, pieces):
        end = begin + _aligned(piece.nbytes)
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def block_message(
    packed: Tensor, changed: Tensor | None, runs: Sequence[tuple[int, int]]
) -> tuple[int, Tensor]:
    """A message: what changed, or everything where that is no more.

    Args:
        packed: uint8, a multiple of ``BLOCK``.
        changed: bool, which of its blocks differ from what was sent; None: not known.
        runs: first byte, and the one after the last, of the message's parts in ``packed``.

    Returns:
        Number of blocks (or ``WHOLE``) and content, as in ``Message``.
    """
    if changed is not None:
        mask = _joined([changed[begin // BLOCK : end // BLOCK] for begin, end in runs])
        index = mask.nonzero().flatten()
        blocks = len(index)
        if _message_bytes(blocks, 0) < len(mask) * BLOCK:
            content = packed.new_zeros(_message_bytes(blocks, 0))
            content[: blocks * INDEX_BYTES].view(torch.int32).copy_(index)
            of_runs = _joined([packed[begin:end] for begin, end in runs]).view(-1, BLOCK)
            content[len(content) - blocks * BLOCK :].view(-1, BLOCK).copy_(of_runs[index])
            return blocks, content
    return WHOLE, _joined([packed[begin:end] for begin, end in runs])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
