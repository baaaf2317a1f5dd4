"""Moving sequences between ranks: a plan of who sends which to whom, and one all-to-all.

Sequences have numbers, equal on all ranks. A rank holds the per-token tensors of some of them,
concatenated in the order of their numbers. The plan is arithmetic on these numbers, so that every
rank knows all messages without asking. The bytes travel between CPUs, in one collective.

Shapes: ``B`` sequences, ``T`` tokens of the sequences that a rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.cpu.node_copies import first_on_node, nodes_of, share_on_node
from mppo.parallel.collectives import group_size

EVERYWHERE = -1
"""Source, or home, of a sequence that every rank holds."""
SMALLEST_SHARED = 1 << 20
"""Bytes from which the ranks of a node share one copy: sharing takes two more messages."""


@dataclass(frozen=True)
class Moves:
    """Which sequences every rank of a group receives, and from whom. ``source`` is the rank that
    sends each sequence, by its number; ``EVERYWHERE`` if each receiver holds it already. ``wanted``
    are the sequences that each rank receives, in its order."""

    source: Sequence[int]
    wanted: Sequence[Sequence[int]]

    def between(self, sender: int, receiver: int) -> list[int]:
        """Sequences that travel from one rank to another, or stay where both are the same."""
        keeps = {sender, EVERYWHERE} if sender == receiver else {sender}
        return [number for number in self.wanted[receiver] if self.source[number] in keeps]

    @property
    def is_local(self) -> bool:
        """Whether no rank sends anything to another one."""
        return all(
            self.source[number] in (rank, EVERYWHERE)
            for rank, wanted in enumerate(self.wanted)
            for number in wanted
        )


def exchange(
    moves: Moves,
    lengths: Sequence[int],
    held: Sequence[int],
    tensors_for: Callable[[int], Sequence[Tensor]],
    group: dist.ProcessGroup | None = None,
    alike: Sequence[Hashable] | None = None,
) -> list[Tensor]:
    """Carry out a plan. Collective, unless the plan is local.

    Args:
        lengths: tokens of each sequence, by number.
        held: numbers of the sequences that this rank holds, in the order of its tensors.
        tensors_for: the tensors ``[T, ...]`` (CPU) of the held sequences that a receiver gets; the
            number of tensors, their dtypes and shapes beyond T depend only on the receiver.
        group: a group of CPU ranks; None is the default one.
        alike: by rank; equal for ranks that want the same sequences and get the same tensors. On a
            node these ranks share one copy. None: no two ranks are alike.

    Returns:
        ``[T', ...]`` of the sequences this rank wants, in that order. Nobody may write to them:
        they may be those of ``tensors_for`` or another rank's.
    """
    rank = dist.get_rank(group) if group_size(group) > 1 else 0
    if moves.is_local:
        pieces = _Pieces(held, [lengths[number] for number in held])
        return [pieces.select(tensor, moves.wanted[rank]) for tensor in tensors_for(rank)]
    first = None
    if alike is not None:
        first = first_on_node(alike, nodes_of(group), moves.wanted)
        large = (
            _tokens(moves.wanted[source], lengths) * sum(map(_row_bytes, tensors_for(source)))
            for source in {source for to, source in enumerate(first) if source != to}
        )
        if max(large, default=0) < SMALLEST_SHARED:
            first = None
    if first is None:
        return _all_to_all(moves, lengths, held, tensors_for, group)
    received = [wanted if first[to] == to else () for to, wanted in enumerate(moves.wanted)]
    got = _all_to_all(Moves(moves.source, received), lengths, held, tensors_for, group)
    if first.count(first[rank]) == 1:
        share_on_node(None, [], None, group)
        return got
    tokens, gives = _tokens(moves.wanted[rank], lengths), first[rank] == rank
    like = [((tokens, *tensor.shape[1:]), tensor.dtype) for tensor in tensors_for(rank)]
    return share_on_node(got if gives else None, like, None if gives else first[rank], group)


def _all_to_all(
    moves: Moves,
    lengths: Sequence[int],
    held: Sequence[int],
    tensors_for: Callable[[int], Sequence[Tensor]],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    rank, ranks = dist.get_rank(group), range(len(moves.wanted))
    pieces = _Pieces(held, [lengths[number] for number in held])
    mine = tensors_for(rank)
    sent = [moves.between(rank, receiver) for receiver in ranks]
    out = [list(tensors_for(to)) if sent[to] else [] for to in ranks]
    out_sizes = [_tokens(sent[to], lengths) * sum(map(_row_bytes, out[to])) for to in ranks]
    message, end = torch.empty(sum(out_sizes), dtype=torch.uint8), 0
    for to in ranks:
        for tensor in out[to]:
            part = _bytes(pieces.select(tensor, sent[to]))
            message[end : end + len(part)] = part
            end += len(part)
    came = [moves.between(sender, rank) for sender in ranks]
    width = sum(map(_row_bytes, mine))
    in_sizes = [_tokens(numbers, lengths) * width for numbers in came]
    received = torch.empty(sum(in_sizes), dtype=torch.uint8)
    dist.all_to_all_single(received, message, in_sizes, out_sizes, group=group)
    del message
    return _unpacked(received, in_sizes, came, moves.wanted[rank], lengths, mine)


def _unpacked(
    received: Tensor,
    sizes: Sequence[int],
    came: Sequence[Sequence[int]],
    wanted: Sequence[int],
    lengths: Sequence[int],
    like: Sequence[Tensor],
) -> list[Tensor]:
    """The tensors in the bytes from all ranks, their sequences in the order wanted."""
    numbers = [number for part in came for number in part]
    pieces = _Pieces(numbers, [lengths[number] for number in numbers])
    parts: list[list[Tensor]] = [[] for _ in like]
    for chunk, part in zip(received.split(list(sizes)), came, strict=True):
        first, tokens = 0, _tokens(part, lengths)
        for place, tensor in enumerate(like):
            size = tokens * _row_bytes(tensor)
            # a copy, since the bytes may not lie at a multiple of the dtype's size
            values = chunk[first : first + size].clone().view(tensor.dtype)
            parts[place].append(values.view(tokens, *tensor.shape[1:]))
            first += size
    return [pieces.select(torch.cat(rows), wanted) for rows in parts]


class _Pieces:
    def __init__(self, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        self._numbers = list(numbers)
        bounds = pairwise(accumulate(lengths, initial=0))
        self._bounds = dict(zip(self._numbers, bounds, strict=True))

    def select(self, tensor: Tensor, wanted: Sequence[int]) -> Tensor:
        """Concatenate the sequences wanted; the tensor itself where these are all, in order."""
        if list(wanted) == self._numbers:
            return tensor
        return torch.cat([tensor[:0], *(tensor[slice(*self._bounds[i])] for i in wanted)])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _tokens(numbers: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[number] for number in numbers)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a CPU tensor over all ranks in place; exact if at most one has a nonzero. Collective."""
    if group_size() > 1:
        dist.all_reduce(values)
    return values
