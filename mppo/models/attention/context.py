"""Context parallelism: sequences split over ranks so that causal attention is balanced.

A sequence is padded to a multiple of ``2 * size`` and cut into that many chunks; rank r holds
chunks r and ``2 * size - 1 - r`` (zig-zag), one cheap and one expensive under a causal mask. Keys
and values are gathered over the group inside the attention, or passed around it
(:mod:`mppo.models.attention.ring`); everything else works on local tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ContextPlace:
    size: int
    rank: int

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank


@dataclass(frozen=True)
class ContextRows:
    """Sequences of one padded length; their local tokens begin at ``start``: first the first chunks
    of all rows, ``chunk`` tokens each, then their second chunks."""

    start: int
    rows: int
    chunk: int

    def chunk_of(self, x: Tensor, part: int) -> Tensor:
        """A view ``[rows, chunk, ...]`` of ``[t, ...]``: the first (0) or second (1) chunks."""
        count = self.rows * self.chunk
        start = self.start + part * count
        return x[start : start + count].unflatten(0, (self.rows, self.chunk))


@dataclass(frozen=True)
class ContextSplit:
    """How sequences of ``T`` tokens in all are split into ``t`` local tokens.

    Args:
        origin_t: int64 ``[t]``, index of each local token among the ``T``; -1 for padding.
        positions_t: int64 ``[t]``, position of each local token in its sequence.
        cu_seqlens: int64 ``[B + 1]``, bounds of the padded sequences before the split, in the order
            of the rows.
    """

    place: ContextPlace
    rows: tuple[ContextRows, ...]
    origin_t: Tensor
    positions_t: Tensor
    cu_seqlens: Tensor


def split_context(
    lengths: list[int], place: ContextPlace, multiple: int, merge: bool = True
) -> ContextSplit:
    """Split sequences over a context-parallel group.

    Args:
        lengths: tokens of each sequence; an empty list gives one padding sequence.
        multiple: the local token count, which is the same on every rank, is a multiple of this.
        merge: whether sequences of one padded length share a ``ContextRows``; otherwise each has
            its own, in the order given (Transformer Engine's layout).
    """
    # every sequence is padded to the same number of tokens per chunk, so ranks hold equally many
    unit = 2 * place.size
    chunks = [math.ceil(length / unit) for length in lengths]
    local = 2 * sum(chunks)
    # padding is a sequence of its own and thus has two chunks per rank: an even number of tokens
    step = math.lcm(2, multiple)
    padding = -local % step if local else step
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    # equal chunk lengths share one attention call; without merging each sequence is its own group
    members: dict[tuple[int, int], list[int]] = {}
    for index, chunk in enumerate(chunks):
        if chunk:
            members.setdefault((chunk, 0 if merge else index), []).append(index)
    rows, origin, positions, padded = [], [], [], []
    start = 0
    for (chunk, _), sequences in members.items():
        rows.append(ContextRows(start, len(sequences), chunk))
        start += 2 * len(sequences) * chunk
        padded += [unit * chunk] * len(sequences)
        first = torch.tensor([starts[i] for i in sequences])[:, None]
        length = torch.tensor([lengths[i] for i in sequences])[:, None]
        # all first chunks, then all second ones: each is one contiguous [rows, chunk] view
        for part in place.chunks:
            position = part * chunk + torch.arange(chunk).expand(len(sequences), -1)
            origin.append(torch.where(position < length, first + position, -1).flatten())
            positions.append(position.flatten())
    if padding:
        rows.append(ContextRows(start, 1, padding // 2))
        padded.append(padding // 2 * unit)
        for part in place.chunks:
            origin.append(torch.full((padding // 2,), -1))
            positions.append(part * (padding // 2) + torch.arange(padding // 2))
    return ContextSplit(
        place=place,
        rows=tuple(rows),
        origin_t=torch.cat(origin),
        positions_t=torch.cat(positions),
        cu_seqlens=torch.tensor([0, *padded]).cumsum(0),
    )


def sequence_order(gathered: Tensor, rows: ContextRows, place: ContextPlace) -> Tensor:
    """Put the gathered keys or values of a group of sequences, ``[size * t, ...]``, into sequence
    order: ``[rows, 2 * size * chunk, ...]``."""
    tail = gathered.shape[1:]
    by_rank = gathered.view(place.size, -1, *tail)
    part = by_rank[:, rows.start : rows.start + 2 * rows.rows * rows.chunk]
    part = part.reshape(place.size, 2, rows.rows, rows.chunk, *tail)
    # rank r holds chunks r and 2 * size - 1 - r: the first halves ascend, the second ones descend
    ordered = torch.cat([part[:, 0], part[:, 1].flip(0)])
    return ordered.transpose(0, 1).reshape(rows.rows, -1, *tail)
