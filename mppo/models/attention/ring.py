"""Ring attention: keys and values travel around the context-parallel group.

While a rank attends to one rank's keys and values, the next one's are under way; in the backward
pass they travel once more, and their gradients behind them, so that nothing as long as the whole
sequence is ever held. Sources: Ring Attention (https://arxiv.org/abs/2310.01889), with the balanced
causal split of :mod:`mppo.models.attention.context`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.models.attention.block import BlockAttention
from mppo.models.attention.context import ContextPlace, ContextSplit


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, split: ContextSplit, block: BlockAttention, group
) -> Tensor:
    """Causal attention of sequences that are split over a group. Collective.

    Args:
        q: ``[t, heads, dim]``, the local tokens.
        k, v: ``[t, groups, dim]``, each with its own width.
        split: where the local tokens stand in their sequences.
        block: attention of a chunk on a chunk.
        group: the context-parallel process group.

    Returns:
        ``[t, heads, value_dim]`` in the dtype of ``q``.
    """
    return _RingAttention.apply(q, k, v, _Ring(split, block, group))


def chunk_pairs(place: ContextPlace, source: int) -> list[tuple[int, int, int]]:
    """What this rank computes on the keys of another.

    Args:
        place: this rank's place in the group.
        source: the rank whose keys they are.

    Returns:
        Which of the two chunks here looks at which of the two there, and how many chunks lie
        between their beginnings; the nearest first. Every rank has three with itself, and two with
        any other.
    """
    theirs = ContextPlace(place.size, source).chunks
    pairs = [
        (part, other, chunk - seen)
        for part, chunk in enumerate(place.chunks)
        for other, seen in enumerate(theirs)
        if seen <= chunk
    ]
    return sorted(pairs, key=lambda pair: pair[2])


def merge_attention(
    out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention on two sets of keys from attention on each.

    ``lse = log(exp(lse_1) + exp(lse_2))``, ``out = sum_i exp(lse_i - lse) out_i``.

    Args:
        out, more: ``[rows, queries, heads, dim]``.
        lse, more_lse: ``[rows, heads, queries]``, log-sum-exp of the scores; the first is finite.

    Returns:
        Output and log-sum-exp over both.
    """
    total = torch.logaddexp(lse, more_lse)
    shares = [(x - total).exp().transpose(1, 2)[..., None] for x in (lse, more_lse)]
    return out * shares[0] + more * shares[1], total


class _RingAttention(torch.autograd.Function):
    """Keeps the local queries, keys, values, output and log-sum-exps for the backward pass."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        out, lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, *lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, *lse = ctx.saved_tensors
        return *ctx.ring.backward(grad, q, k, v, out, lse), None


@dataclass(frozen=True)
class _Ring:
    split: ContextSplit
    block: BlockAttention
    group: dist.ProcessGroup

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Output, and the log-sum-exps of every chunk of every group of sequences."""
        sums: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        held: list[Tensor] = [k.contiguous(), v.contiguous()]
        for source, is_last in self._sources():
            coming = None if is_last else _Passage(held, self.group)
            self._attend(q, *held, source, sums)
            if coming is not None:
                held = coming.wait()
        chunks = [sums[key] for key in sorted(sums)]
        out = torch.cat([out.flatten(0, 1).to(q.dtype) for out, _ in chunks])
        return out, [lse for _, lse in chunks]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local queries, keys and values.

        The sum of the gradients of a rank's keys and values follows them from rank to rank, one
        step behind, and after the last is back at their owner.
        """
        dq = torch.zeros_like(q, dtype=lse[0].dtype)
        held: list[Tensor] = [k.contiguous(), v.contiguous()]
        summed: _Passage | None = None
        for source, is_last in self._sources():
            coming = None if is_last else _Passage(held, self.group)
            grads = self._gradients(grad, q, *held, out, lse, source, dq)
            for x, more in zip(grads, summed.wait() if summed else []):
                x += more
            summed = _Passage([x.to(k.dtype) for x in grads], self.group)
            if coming is not None:
                held = coming.wait()
        return dq.to(q.dtype), *summed.wait()

    def _sources(self) -> Iterator[tuple[int, bool]]:
        """Ranks whose keys and values are here, in turn; whether it is the last."""
        size, rank = self.split.place.size, self.split.place.rank
        for step in range(size):
            yield (rank - step) % size, step == size - 1

    def _blocks(self, source: int) -> Iterator[tuple[int, int, int, int]]:
        """Group of sequences, chunk here, chunk there, and how many tokens it is before."""
        for index, rows in enumerate(self.split.rows):
            for mine, theirs, chunks in chunk_pairs(self.split.place, source):
                apart = chunks * rows.chunk
                if self.block.window is None or apart - rows.chunk + 1 < self.block.window:
                    yield index, mine, theirs, apart

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, source: int, sums: dict) -> None:
        """Add attention on a rank's keys and values to ``sums``."""
        for index, mine, theirs, apart in self._blocks(source):
            chunk = self.split.rows[index].chunk_of
            more = self.block.forward(chunk(q, mine), chunk(k, theirs), chunk(v, theirs), apart)
            found = sums.get((index, mine))
            sums[index, mine] = more if found is None else merge_attention(*found, *more)

    def _gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: list[Tensor],
        source: int, dq: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """The local queries' share of the gradients of a rank's keys and values; adds to ``dq``."""
        dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
        for index, mine, theirs, apart in self._blocks(source):
            chunk = self.split.rows[index].chunk_of
            found = self.block.backward(
                chunk(grad, mine), chunk(q, mine), chunk(k, theirs), chunk(v, theirs),
                chunk(out, mine), lse[2 * index + mine], apart,
            )  # fmt: skip
            for x, part, more in zip((dq, dk, dv), (mine, theirs, theirs), found, strict=True):
                chunk(x, part).add_(more)
        return [dk, dv]


class _Passage:
    """Tensors on their way to the next rank of a group, and the previous one's to this."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        ends = {"group_peer": (rank + 1) % size}, {"group_peer": (rank - 1) % size}
        self._sent, self._received = tensors, [torch.empty_like(x) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, group=group, **ends[0]) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, **ends[1]) for x in self._received]
        self._works = dist.batch_isend_irecv(sends + receives)

    def wait(self) -> list[Tensor]:
        """What came, when all is sent and received; nothing is held here any more."""
        for work in self._works:
            work.wait()
        received = self._received
        self._sent, self._received, self._works = (), [], []
        return received
