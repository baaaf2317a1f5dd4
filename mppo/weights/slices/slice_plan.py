"""Which slices of which parameters each training rank sends to each rollout rank, by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mppo.recipe.model_shape import ModelShape
from mppo.weights.bucket import aligned
from mppo.weights.slices.message_bytes import BLOCK
from mppo.weights.slices.reshard import EngineTensor, Reshard, engine_tensor
from mppo.weights.table import Entry

Key = tuple[int, str, int, int]
"""A part of a training rank's shard: the rank, the entry's name, offset and length in the shard."""


@dataclass(frozen=True)
class SliceRequest:
    """The slices a rollout engine needs; the same on every rank.

    Args:
        hosts: for each engine, the training rank that hosts each of its tensor-parallel ranks.
        dtype: of the engine's weights.
        bucket_bytes: most bytes of a bucket for one rollout rank.
        keep: keep what was sent, so that the next update can leave out unchanged blocks.
        checksum: of a piece's bytes, sent with it; None: no checksums.
        expert_parallel: groups of an engine's ranks among which its experts are divided.
    """

    hosts: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    bucket_bytes: int
    keep: bool = False
    checksum: Callable[[Tensor], tuple[int, int]] | None = None
    expert_parallel: int = 1

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(host for engine in self.hosts for host in engine)


@dataclass(frozen=True)
class Piece:
    """A slice of one parameter of a rollout rank.

    Args:
        dim: dimension along which the slice is cut (of one expert, if the parameter holds experts).
        offset: first index along ``dim``.
        shape: of the slice; ``shape[dim]`` is its length.
        begin: its first byte in the message, a multiple of ``BLOCK``.
        key: the part of a training rank's shard that it is copied from.
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
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes in the message: a multiple of ``BLOCK``."""
        return aligned(self.nbytes, BLOCK)


@dataclass(frozen=True)
class SlicePlan:
    """One bucket: pieces by (training rank, rollout rank); each list is one message."""

    pieces: dict[tuple[int, int], tuple[Piece, ...]]

    @cached_property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Bytes of each message if every block is sent."""
        return {
            pair: pieces[-1].begin + pieces[-1].padded_bytes for pair, pieces in self.pieces.items()
        }

    def packed(self, source: int) -> dict[Key, tuple[int, Piece]]:
        """The distinct pieces that a training rank packs, with the first byte of each. Rollout
        ranks with the same slice share one packed copy."""
        found: dict[Key, tuple[int, Piece]] = {}
        at = 0
        for (rank, _), pieces in self.pieces.items():
            for piece in pieces if rank == source else ():
                if piece.key not in found:
                    found[piece.key] = (at, piece)
                    at += piece.padded_bytes
        return found


def plan_slices(
    reshards: Iterable[Reshard],
    shape: ModelShape,
    request: SliceRequest,
    dtype_of: Callable[[Entry], torch.dtype],
) -> Iterator[SlicePlan]:
    """Divide the moves of all entries, in the table's order, into buckets."""
    found: dict[tuple[int, int], list[Piece]] = {}
    filled = [0] * len(request.slots)
    for reshard in reshards:
        new = list(_pieces(reshard, shape, request, dtype_of(reshard.entry)))
        added = [0] * len(filled)
        for _, slot, piece in new:
            added[slot] += piece.padded_bytes
        # an entry is never divided over buckets: a larger one gets a bucket of its own
        if found and max(a + b for a, b in zip(filled, added)) > request.bucket_bytes:
            yield _slice_plan(found)
            found, filled = {}, [0] * len(filled)
        filled = [a + b for a, b in zip(filled, added)]
        for source, slot, piece in new:
            message = found.setdefault((source, slot), [])
            begin = message[-1].begin + message[-1].padded_bytes if message else 0
            message.append(replace(piece, begin=begin))
    yield _slice_plan(found)


def _slice_plan(found: dict[tuple[int, int], list[Piece]]) -> SlicePlan:
    # sorted: all ranks must go through the messages in the same order
    return SlicePlan({pair: tuple(found[pair]) for pair in sorted(found)})


def _pieces(
    reshard: Reshard, shape: ModelShape, request: SliceRequest, dtype: torch.dtype
) -> Iterator[tuple[int, int, Piece]]:
    entry, dim = reshard.entry, reshard.entry.cut_dim
    ranks = [(rank, len(engine)) for engine in request.hosts for rank in range(len(engine))]
    for move in reshard.moves:
        target = engine_tensor(
            entry, shape, *ranks[move.slot], expert_parallel=request.expert_parallel
        )
        full = entry.row.shapes[0]
        sliced = (*full[:dim], move.length, *full[dim + 1 :])
        key = (move.source, entry.name, move.source_offset, move.length)
        at = target.first + move.destination_offset
        yield move.source, move.slot, Piece(target, dim, at, sliced, dtype, 0, key)
