"""Dividing sequences over data-parallel ranks and micro-batches, as plain lists.

Invariants (asserted in tests): every sequence appears once; every data-parallel rank gets the same
number of micro-batches, a multiple of ``count_multiple``; a micro-batch holds at most
``max_sequences`` sequences, or at most ``max_tokens`` tokens unless it is one longer sequence
alone; an empty micro-batch is allowed (a rank then runs a dummy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mppo.parallel.partition import partition

MicroBatchPlan = list[list[list[int]]]
"""``plan[dp_rank][micro_batch]`` is a list of sequence indices."""


@dataclass(frozen=True)
class MicroBatchLimits:
    """Size limit of one micro-batch: tokens, or where these are None, sequences."""

    max_sequences: int
    max_tokens: int | None = None


@dataclass(frozen=True)
class MicroBatchSpec:
    """How a role's sequences are cut into micro-batches: over ``dp`` data-parallel ranks, each with
    a multiple of ``count_multiple`` micro-batches (pipeline size under interleaving)."""

    dp: int
    count_multiple: int
    limits: MicroBatchLimits

    def plan(self, lengths: Sequence[int], indices: Sequence[int] | None = None) -> MicroBatchPlan:
        """Plan the micro-batches of one pass over some sequences of a batch (None: all of them)."""
        chosen = range(len(lengths)) if indices is None else indices
        return plan_microbatches(lengths, chosen, self.dp, self.limits, self.count_multiple)


def plan_microbatches(
    lengths: Sequence[int],
    indices: Sequence[int],
    dp: int,
    limits: MicroBatchLimits,
    count_multiple: int = 1,
) -> MicroBatchPlan:
    """Plan the micro-batches of one pass over the sequences ``indices`` of a batch; the invariants
    at the top of this module hold."""
    shares = [
        [indices[i] for i in part]
        for part in partition([lengths[i] for i in indices], dp, equal_count=True)
    ]
    count = max(1, *(_needed([lengths[i] for i in share], limits) for share in shares))
    count = math.ceil(count / count_multiple) * count_multiple
    return [_split(share, lengths, count, limits) for share in shares]


def _needed(lengths: Sequence[int], limits: MicroBatchLimits) -> int:
    """Number of micro-batches that one rank's share needs, by first-fit decreasing."""
    if limits.max_tokens is None:
        return math.ceil(len(lengths) / limits.max_sequences)
    return len(_first_fit(list(range(len(lengths))), lengths, limits.max_tokens))


def _first_fit(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Bins of at most ``max_tokens``: longest first, each into the first bin with room for it."""
    bins: list[list[int]] = []
    size = 1 << max(len(indices) - 1, 0).bit_length()
    # a binary tree over the bins, from node 1: the largest room of any bin below
    room = [max_tokens] * (2 * size)
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        length, node = lengths[i], 1
        while node < size:
            node = 2 * node + (room[2 * node] < length)
        place = node - size if length <= max_tokens else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        node = size + place
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _split(
    share: Sequence[int], lengths: Sequence[int], count: int, limits: MicroBatchLimits
) -> list[list[int]]:
    """Split one rank's share into ``count`` micro-batches, evenly if the limits allow it."""
    weights = [lengths[i] for i in share]
    even = partition(weights, count, equal_count=limits.max_tokens is None)
    if limits.max_tokens is not None and any(
        sum(weights[i] for i in part) > limits.max_tokens and len(part) > 1 for part in even
    ):
        even = _first_fit(range(len(share)), weights, limits.max_tokens)
        even = [sorted(part) for part in even] + [[] for _ in range(count - len(even))]
    return [[share[i] for i in part] for part in even]
