"""Seconds of a decoder layer's passes on one rank, product by product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from mppo.parallel.layout import Layout
from mppo.planning.time.collective_time import Group, collective_seconds
from mppo.planning.time.cost import Cost
from mppo.planning.time.kernels import Collective, Kernels
from mppo.recipe.model_shape import ModelShape

BYTES = 2
"""Bytes of a bfloat16 activation."""
STREAMED = 0.8
"""Share of the memory's bandwidth that operations which only read and write reach."""
STARTED = 3e-6
"""Seconds that such an operation takes at least."""
ATTENTION_BACKWARD = 3.0
"""Backward over forward pass of FlashAttention 3: 2.5 times the operations at five sixths of the
rate (Shah et al. 2024, figures 5 and 6)."""

IMBALANCE = 1.3
"""Tokens of the busiest expert-parallel rank over their mean, where nothing balances the experts:
the ratio of the measured times of unevenly and evenly loaded experts over eight ranks."""

Product = tuple[int, int, int]
"""Rows, output width and input width of a matrix product."""


def gemms(kernels: Kernels, products: Sequence[Product], backward: bool, count: int = 1) -> Cost:
    """Seconds of products in a forward pass, each ``count`` times, or of both products of each (the
    gradients of inputs and weights) in a backward pass."""
    seconds = 0.0
    for m, n, k in products:
        if backward:
            seconds += kernels.gemm(m, k, n) + kernels.gemm(n, k, m)
        else:
            seconds += kernels.gemm(m, n, k)
    launches = len(products) * (2 if backward else 1)
    return Cost(compute=seconds * count, launches=launches * count)


def streamed(kernels: Kernels, nbytes: float, operations: int) -> Cost:
    """Seconds of operations that read and write ``nbytes`` in all."""
    seconds = nbytes / (STREAMED * kernels.system.memory) + operations * STARTED
    return Cost(memory=seconds, launches=operations)


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer in a micro-batch of packed sequences.

    Args:
        tokens: tokens of the micro-batch on this rank (its share of context parallelism).
        length: tokens of a sequence.
        outputs: those of its tokens that pass the feed-forward; None: all.
    """

    kernels: Kernels
    shape: ModelShape
    active: int
    layout: Layout
    sparse: bool
    tokens: int
    length: float
    outputs: int | None = None

    @cached_property
    def forward(self) -> Cost:
        return (
            gemms(self.kernels, self._projections, backward=False)
            + self._attention
            + self._feed_forward(backward=False)
            + self._elementwise
            + self._exchanges(4)
        )

    @cached_property
    def backward(self) -> Cost:
        """A backward pass, without recomputation.

        Of the exchanges of tensor parallelism, those of inputs and of their gradients run beside
        the products (Megatron's ``LinearWithGradAccumulationAndAsyncCommunication``), where they
        can.
        """
        return (
            gemms(self.kernels, self._projections, backward=True)
            + self._attention * ATTENTION_BACKWARD
            + self._feed_forward(backward=True)
            + self._elementwise * 2
            + self._exchanges(2 if self.kernels.system.beside else 6)
        )

    @cached_property
    def _projections(self) -> list[Product]:
        s, t, tp = self.shape, self.tokens, self.layout.tp
        heads, mla = s.heads // tp, s.mla
        if mla is None:
            keys = 2 * max(1, s.kv_heads // tp)
            width = (heads + keys) * s.head_dim
            return [(t, width, s.hidden), (t, s.hidden, heads * s.head_dim)]
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        # the down projections are complete on every rank; its tokens are its share
        own = ceil(t / tp)
        down = [] if rank is None else [(own, rank, s.hidden)]
        return [
            *down,
            (t, queries, rank or s.hidden),
            (own, mla.kv_lora_rank + mla.qk_rope_head_dim, s.hidden),
            (t, heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            (t, s.hidden, heads * mla.v_head_dim),
        ]

    @cached_property
    def _attention(self) -> Cost:
        """Causal attention; latent attention computes with keys of 192 and values of 128."""
        s, tp, cp = self.shape, self.layout.tp, self.layout.cp
        # measured for whole sequences: as many as the context-parallel ranks have together
        count = max(1, round(self.tokens * cp / self.length))
        length = max(1, round(self.tokens * cp / count))
        heads = s.heads // tp
        dim, keys, ratio = s.head_dim, max(1, s.kv_heads // tp), 1.0
        if s.mla is not None:
            wide = s.mla.qk_nope_head_dim + s.mla.qk_rope_head_dim + s.mla.v_head_dim
            dim, keys = 128, heads
            ratio = wide / (2 * dim)
        seconds = ratio * self.kernels.attention(count, length, heads, keys, dim) / cp
        return Cost(compute=seconds, launches=1)

    def _feed_forward(self, backward: bool) -> Cost:
        s, t, tp = self.shape, self.tokens, self.layout.tp
        wide = 1 + s.gated
        if not self.sparse:
            return gemms(self.kernels, self._dense(s.ffn, wide), backward)
        local = s.num_experts // self.layout.ep
        rows = self._imbalance * t * self.active / tp * self.layout.ep / s.num_experts
        rows = max(1, round(rows)) * self.layout.etp
        width = s.expert_ffn // self.layout.etp
        experts: list[Product] = [(rows, wide * width, s.hidden), (rows, s.hidden, width)]
        router: list[Product] = [(ceil(t / tp), s.num_experts, s.hidden)]
        cost = gemms(self.kernels, router, backward)
        # the host reads how many tokens each expert has, in the forward pass
        cost += Cost(waits=not backward)
        cost += gemms(self.kernels, experts, backward, local)
        if s.shared_ffn:
            cost += gemms(self.kernels, self._dense(s.shared_ffn, wide), backward)
        return cost

    @property
    def _imbalance(self) -> float:
        return IMBALANCE if self.layout.ep > 1 else 1.0

    def _dense(self, ffn: int, wide: int) -> list[Product]:
        t = self.tokens if self.outputs is None else self.outputs
        hidden, width = self.shape.hidden, ffn // self.layout.tp
        return [(t, wide * width, hidden), (t, hidden, width)]

    @cached_property
    def _elementwise(self) -> Cost:
        """Norms, residuals, rotary angles, activations, and sorting by expert."""
        s, t, layout = self.shape, self.tokens, self.layout
        own = t / layout.tp  # sequence parallelism divides what is between the matrices
        # two norms read and write, two residuals read twice and write
        elements = own * s.hidden * (2 * 2 + 2 * 3)
        heads = (s.heads + max(s.kv_heads, layout.tp)) / layout.tp
        elements += t * heads * s.head_dim * (4 if s.qk_norm else 2)
        operations = 4 + (4 if s.qk_norm else 2)
        if self.sparse:
            assigned = own * self.active  # tokens of this rank, once for each of their experts
            elements += assigned * s.hidden * 4 + assigned * s.expert_ffn * (2 + s.gated)
            elements += own * s.num_experts * 4
            elements += t * s.shared_ffn / layout.tp * 3
            operations += 12
        else:
            elements += t * s.ffn / layout.tp * (2 + s.gated)
            operations += 1
        return streamed(self.kernels, elements * BYTES, operations)

    def _exchanges(self, tensor: int) -> Cost:
        """Exchanges that nothing hides: gathers and scatters of ``tensor`` parallelism, and two
        all-to-alls of expert parallelism: tokens go to their experts and come back."""
        expert = 2 if self.sparse and self.layout.ep > 1 else 0
        seconds = sum(
            count * collective_seconds(self.kernels, kind, nbytes, group)
            for count, kind, nbytes, group in self._traffic(tensor, expert)
        )
        return Cost(network=seconds, launches=tensor * (self.layout.tp > 1) + expert)

    def _traffic(self, tensor: int, expert: int) -> Iterator[tuple[int, Collective, float, Group]]:
        s, layout = self.shape, self.layout
        whole = self.tokens * s.hidden * BYTES
        # an expert layer's feed-forward gathers no tokens: it sends them
        if self.sparse and not s.shared_ffn:
            tensor //= 2
        yield tensor, "all_gather", whole, Group(layout.tp)
        sent = self._imbalance * whole / layout.tp * self.active
        yield expert, "alltoall", sent, Group(layout.ep, layout.etp)
        if layout.cp > 1:
            keys = 2 * max(1, s.kv_heads // layout.tp) * s.head_dim
            gathered = self.tokens * layout.cp * keys * BYTES
            yield 1, "all_gather", gathered, Group(layout.cp, layout.tp)
