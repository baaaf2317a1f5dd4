"""Seconds of generation: continuous batching of responses whose lengths differ."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mppo.planning.time.collective_time import Group, collective_seconds
from mppo.planning.time.cost import Cost
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.layer import BYTES, Product, gemms, streamed
from mppo.planning.time.lengths import scattered
from mppo.planning.time.role_load import StepSequences
from mppo.recipe.model_shape import ModelShape

ENGINE = 1.67
"""How much longer an engine's steps take than their kernels do one by one: fitted on some of the
published steps (benchmarks/predicted_time.py)."""
TAIL = 0.25
"""The tail of generation: fewer than this share of the most sequences at once are left."""
_PREFILL_TOKENS = 8192
"""Tokens of a chunk of prompts that a server computes at once."""


@dataclass(frozen=True)
class Servers:
    """Engines that generate.

    Args:
        slots: most sequences that one generates at once.
        kv_tokens: tokens for which its KV cache has room; None: no limit known.
    """

    count: int
    tp: int
    slots: int
    kv_tokens: float | None = None
    ep: int = 1


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of generation.

    Args:
        tail: seconds of decoding in the tail.
        agents: seconds in which agents, not the engine, hold the sequences.
    """

    prefill: Cost
    decoding: Cost
    tail: float
    agents: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prefill.seconds + self.decoding.seconds + self.agents


def decode_responses(
    step: Callable[[int, int], Cost], lengths: Sequence[int], prompt: float, slots: int
) -> tuple[Cost, float]:
    """Decode responses by continuous batching on one server: the cost, and the seconds of the tail.

    Args:
        step: seconds of a step by sequences and mean context.
        lengths: tokens of the responses in the order in which they start.
        prompt: tokens of a prompt.
        slots: most sequences at once; one that ends makes room for the next.
    """
    waiting = list(reversed(lengths))
    running: list[tuple[int, int]] = []  # when a response ends and when it began, in steps
    now, cost, tail = 0, Cost(), 0.0
    most = min(slots, len(lengths))
    while waiting or running:
        while waiting and len(running) < most:
            heapq.heappush(running, (now + waiting.pop(), now))
        # responses that end within a fiftieth of their context end together
        grain = max(8, (now - min(began for _, began in running)) // 50)
        until = max(running[0][0], min(now + grain, max(end for end, _ in running)))
        context = prompt + (now + until) / 2 - sum(began for _, began in running) / len(running)
        spent = step(len(running), max(1, round(context))) * (until - now)
        cost += spent
        if not waiting and len(running) < TAIL * most:
            tail += spent.seconds
        now = until
        while running and running[0][0] <= now:
            heapq.heappop(running)
    return cost, tail


class EnginePasses:
    """An engine's passes on one of its ranks."""

    def __init__(self, kernels: Kernels, shape: ModelShape, active: int, servers: Servers) -> None:
        self._kernels, self._shape, self._active = kernels, shape, active
        self._servers = servers
        sparse = sum(shape.sparse_layers)
        self._counts = {False: shape.num_layers - sparse, True: sparse}

    def decode_step(self, batch: int, context: int) -> Cost:
        """A step that makes one token of each sequence; CUDA graphs launch it."""
        s, tp = self._shape, self._servers.tp
        heads = max(1, s.heads // tp)
        if s.mla is not None:
            seconds = self._kernels.latent_decode(batch, context, heads)
        else:
            keys = max(1, s.kv_heads // tp)
            seconds = self._kernels.decode(batch, context, heads, keys, s.head_dim)
        # reading the cache, not multiplying, takes the time
        return self._pass(batch, batch, Cost(memory=seconds), reads_weights=True)

    def prefill(self, sequences: int, length: int) -> Cost:
        s, tp = self._shape, self._servers.tp
        heads = max(1, s.heads // tp)
        keys, dim = max(1, s.kv_heads // tp), s.head_dim
        if s.mla is not None:
            keys, dim = heads, 128
        seconds = self._kernels.attention(sequences, length, heads, keys, dim)
        attention = Cost(compute=seconds)
        return self._pass(sequences * length, sequences, attention, reads_weights=False)

    def generate(self, sequences: StepSequences) -> GenerationTime:
        """All responses of a step.

        Where a shared beginning is computed once, the samples of a prompt share its pass on their
        server, and a turn adds its own tokens alone. Agents' seconds are added once for each time
        that a server is filled, as if nothing were decoded meanwhile.
        """
        servers = self._servers
        responses = math.ceil(sequences.count / servers.count)
        slots = servers.slots
        if servers.kv_tokens is not None:
            slots = max(1, min(slots, int(servers.kv_tokens / sequences.length)))
        turns = sequences.turns
        own = 1 - turns.inserted / sequences.response
        made = [max(1, round(own * n)) for n in sequences.responses(responses)]
        context = sequences.prompt + turns.inserted / 2
        decoding, tail = decode_responses(self.decode_step, scattered(made), context, slots)
        shared = sequences.samples if sequences.cached else 1
        prefill = self._prefill_all(sequences.prompt, math.ceil(responses / shared))
        if turns.count > 1:
            added = turns.tokens
            if not sequences.cached:  # the mean of the beginnings of all turns but the first
                added = sequences.prompt + sequences.response / 2
            prefill += self._prefill_all(added, responses * (turns.count - 1))
        waits = turns.seconds * turns.count * max(1.0, responses / slots)
        return GenerationTime(prefill, decoding, tail, waits)

    def _prefill_all(self, tokens: float, count: float) -> Cost:
        """Passes over ``count`` beginnings of ``tokens``, as many at once as a chunk takes."""
        length = max(1, round(tokens))
        at_once = max(1, min(round(count), _PREFILL_TOKENS // length))
        return self.prefill(at_once, length) * (count / at_once)

    def _pass(self, tokens: int, outputs: int, attention: Cost, reads_weights: bool) -> Cost:
        """A pass over ``tokens`` new tokens, of which ``outputs`` pass the head."""
        s, tp = self._shape, self._servers.tp
        group = Group(tp)
        reduced = collective_seconds(self._kernels, "all_reduce", tokens * s.hidden * BYTES, group)
        layer = gemms(self._kernels, self._projections(tokens), False) + attention
        layer += Cost(network=2 * reduced)
        layer += streamed(self._kernels, tokens * s.hidden * BYTES * 8, 2)
        cost = layer * s.num_layers
        for sparse, count in self._counts.items():
            if count:
                cost += self._feed_forward(tokens, sparse) * count
        head = (outputs, math.ceil(s.vocab / tp), s.hidden)
        cost += gemms(self._kernels, [head], False)
        cost += streamed(self._kernels, outputs * s.vocab / tp * 4 * 4, 4)
        if reads_weights:  # products of few rows read weights
            cost = Cost(memory=cost.compute + cost.memory, network=cost.network)
        return Cost(cost.compute, cost.memory, cost.network) * ENGINE

    def _projections(self, tokens: int) -> list[Product]:
        s, tp = self._shape, self._servers.tp
        heads, mla = max(1, s.heads // tp), s.mla
        if mla is None:
            width = (heads + 2 * max(1, s.kv_heads // tp)) * s.head_dim
            return [(tokens, width, s.hidden), (tokens, s.hidden, heads * s.head_dim)]
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        return [
            (tokens, down, s.hidden),
            (tokens, queries, mla.q_lora_rank or s.hidden),
            # queries into the compressed space, and values out of it
            (tokens, heads * mla.kv_lora_rank, mla.qk_nope_head_dim),
            (tokens, heads * mla.v_head_dim, mla.kv_lora_rank),
            (tokens, s.hidden, heads * mla.v_head_dim),
        ]

    def _feed_forward(self, tokens: int, sparse: bool) -> Cost:
        s, servers = self._shape, self._servers
        wide = 1 + s.gated
        dense = s.shared_ffn if sparse else s.ffn
        cost = Cost()
        if dense:
            width = max(1, dense // servers.tp)
            products: list[Product] = [(tokens, wide * width, s.hidden), (tokens, s.hidden, width)]
            cost += gemms(self._kernels, products, False)
            cost += streamed(self._kernels, tokens * width * 3 * BYTES, 1)
        if sparse:
            tp = servers.tp // servers.ep
            seconds = self._kernels.experts(
                *(tokens, s.hidden, s.expert_ffn, self._active, s.num_experts, tp, servers.ep)
            )
            cost += Cost(compute=seconds)
            cost += gemms(self._kernels, [(tokens, s.num_experts, s.hidden)], False)
        return cost
