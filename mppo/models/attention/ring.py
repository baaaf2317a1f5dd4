"""Ring attention: keys and values are passed around the context-parallel group.

While a rank attends to one rank's keys and values, it receives the next rank's. The backward pass
sends them around once more, followed by their gradients, so that no rank ever holds a tensor as
long as the full sequence. Source: Ring Attention (https://arxiv.org/abs/2310.01889), with the
balanced causal split of :mod:`mppo.models.attention.context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.models.attention.block import BlockAttention
from mppo.models.attention.context import ContextPlace, ContextSplit

_Sums = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""Output and log-sum-exp so far, by group of sequences and chunk."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: ContextSplit,
    block: BlockAttention,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute causal attention of sequences that are split over a group. Collective. Local tokens:
    q ``[t, heads, dim]``; k, v ``[t, groups, dim]``, where ``dim`` of v may differ. Returns ``[t,
    heads, value_dim]`` in the dtype of ``q``."""
    return _RingAttention.apply(q, k, v, _Ring(split, block, group))


def chunk_pairs(place: ContextPlace, source: int) -> list[tuple[int, int, int]]:
    """Which of this rank's two chunks attends to which of the two of ``source``: ``(query part, key
    part, distance)`` of the pairs that are not masked out, by the distance of their starts in
    chunks. There are three pairs with this rank's own keys, and two with any other rank's."""
    key_chunks = ContextPlace(place.size, source).chunks
    pairs = [
        (part, key_part, chunk - key_chunk)
        for part, chunk in enumerate(place.chunks)
        for key_part, key_chunk in enumerate(key_chunks)
        if key_chunk <= chunk
    ]
    return sorted(pairs, key=lambda pair: pair[2])


def merge_attention(
    out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention on two sets of keys, outputs ``[rows, queries, heads, dim]`` with
    log-sum-exps ``[rows, heads, queries]``: ``lse = log(exp(lse_1) + exp(lse_2))``,
    ``out = sum_i exp(lse_i - lse) out_i``; ``lse`` is finite."""
    total = torch.logaddexp(lse, more_lse)
    shares = [(x - total).exp().transpose(1, 2)[..., None] for x in (lse, more_lse)]
    return out * shares[0] + more * shares[1], total


class _RingAttention(torch.autograd.Function):
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
        sums: _Sums = {}
        kv = k.contiguous(), v.contiguous()
        for source, is_last in self._sources():
            transfer = None if is_last else _RingTransfer(kv, self.group)
            self._attend(q, *kv, source, sums)
            if transfer is not None:
                kv = transfer.wait()
        chunks = [sums[key] for key in sorted(sums)]
        out = torch.cat([out.flatten(0, 1).to(q.dtype) for out, _ in chunks])
        return out, [lse for _, lse in chunks]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. Those of a rank's keys and values follow them from rank to rank,
        one step behind, and after the last step arrive back at their owner."""
        dq = torch.zeros_like(q, dtype=lse[0].dtype)
        kv = k.contiguous(), v.contiguous()
        arriving: _RingTransfer | None = None
        for source, is_last in self._sources():
            transfer = None if is_last else _RingTransfer(kv, self.group)
            dk, dv = self._gradients(grad, q, *kv, out, lse, source, dq)
            if arriving is not None:
                # the sums of the ranks that these keys have passed so far
                more_dk, more_dv = arriving.wait()
                dk += more_dk
                dv += more_dv
            arriving = _RingTransfer((dk.to(k.dtype), dv.to(k.dtype)), self.group)
            if transfer is not None:
                kv = transfer.wait()
        assert arriving is not None, "a group has at least one rank"
        dk, dv = arriving.wait()
        return dq.to(q.dtype), dk, dv

    def _sources(self) -> Iterator[tuple[int, bool]]:
        """The rank whose keys and values are held at each step; whether the step is the last."""
        size, rank = self.split.place.size, self.split.place.rank
        for step in range(size):
            yield (rank - step) % size, step == size - 1

    def _blocks(self, source: int) -> Iterator[tuple[int, int, int, int]]:
        """``(group of sequences, query part, key part, offset in tokens)`` of all blocks."""
        for index, rows in enumerate(self.split.rows):
            for q_part, k_part, chunks in chunk_pairs(self.split.place, source):
                offset = chunks * rows.chunk
                # skip chunks that lie before the sliding window of every query
                if self.block.window is None or offset - rows.chunk + 1 < self.block.window:
                    yield index, q_part, k_part, offset

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, source: int, sums: _Sums) -> None:
        for index, q_part, k_part, offset in self._blocks(source):
            chunk = self.split.rows[index].chunk_of
            more = self.block.forward(chunk(q, q_part), chunk(k, k_part), chunk(v, k_part), offset)
            merged = sums.get((index, q_part))
            sums[index, q_part] = more if merged is None else merge_attention(*merged, *more)

    def _gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: list[Tensor],
        source: int, dq: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The local queries' share of the gradients of a rank's keys and values; adds to ``dq``."""
        dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
        for index, q_part, k_part, offset in self._blocks(source):
            chunk = self.split.rows[index].chunk_of
            more_dq, more_dk, more_dv = self.block.backward(
                chunk(grad, q_part), chunk(q, q_part), chunk(k, k_part), chunk(v, k_part),
                chunk(out, q_part), lse[2 * index + q_part], offset,
            )  # fmt: skip
            chunk(dq, q_part).add_(more_dq)
            chunk(dk, k_part).add_(more_dk)
            chunk(dv, k_part).add_(more_dv)
        return dk, dv


class _RingTransfer:
    """An exchange under way: a pair of tensors to the next rank, the previous rank's pair here."""

    def __init__(self, tensors: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        following, preceding = (rank + 1) % size, (rank - 1) % size
        first, second = tensors
        received = torch.empty_like(first), torch.empty_like(second)
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=following) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=preceding) for x in received]
        self._sent, self._received = tensors, received
        self._works = dist.batch_isend_irecv(sends + receives)

    def wait(self) -> tuple[Tensor, Tensor]:
        """The received pair, once both directions are complete; call it once."""
        for work in self._works:
            work.wait()
        received = self._received
        # release what was sent: the caller still holds this object while it attends
        del self._sent, self._received, self._works
        return received
