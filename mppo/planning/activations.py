"""Bytes of a decoder layer's activations on one rank, tensor by tensor.

The lists follow Megatron's layers with this package's modules or with Transformer Engine's
(``mppo.models.stage``). Shapes are per token of the rank's micro-batch; ``mppo-simulate`` executes
the same code, and tests compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mppo.models.attention import flash
from mppo.models.families.family import activation_key
from mppo.parallel.layout import Layout
from mppo.planning.memory import transformer_engine_is_installed
from mppo.recipe.model_shape import ModelShape
from mppo.recipe.sections.megatron import MegatronConfig

_FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class ModelKind:
    """What the activations of a model depend on besides its layout.

    Args:
        active_experts: experts that process a token.
        softcap: attention scores are soft-capped without a fused kernel: only flash-attn has one.
    """

    shape: ModelShape
    active_experts: int = 0
    softcap: bool = False
    logit_softcap: bool = False
    activation: str = "silu"
    transformer_engine: bool = False

    @property
    def float32_norms(self) -> bool:
        """Whether norms compute in float32: those with zero-centred weights (Gemma) do here."""
        return self.shape.like.startswith("gemma") and not self.transformer_engine


def model_kind(hf_config: Any, shape: ModelShape, active_experts: int) -> ModelKind:
    """Read a model's kind from its Hugging Face config."""
    softcap = bool(getattr(hf_config, "attn_logit_softcapping", None))
    return ModelKind(
        shape,
        active_experts,
        softcap=softcap and not flash.is_installed(),
        logit_softcap=bool(getattr(hf_config, "final_logit_softcapping", None)),
        activation=getattr(hf_config, activation_key(hf_config), "silu"),
        transformer_engine=transformer_engine_is_installed() and not softcap,
    )


@dataclass(frozen=True)
class Part:
    """One half of a layer, attention or feed-forward: bytes per micro-batch.

    Args:
        backward: most allocated at once in the backward pass beyond ``kept``; negative where it
            frees more than it allocates.
    """

    kept: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Layer:
    """Activations of one decoder layer on one rank.

    Args:
        longest: tokens of a sequence.
    """

    kind: ModelKind
    megatron: MegatronConfig
    layout: Layout
    sparse: bool
    tokens: float
    longest: int
    itemsize: int

    @cached_property
    def stream(self) -> float:
        """Hidden states between the layer's halves, divided by sequence parallelism."""
        size = self.tokens * self.kind.shape.hidden * self.itemsize
        return size / self.layout.tp if self.sequence_parallel else size

    @property
    def sequence_parallel(self) -> bool:
        return self.megatron.sequence_parallel and self.layout.tp > 1

    @cached_property
    def gathered(self) -> float:
        """Hidden states of all tokens, as the matrices take them."""
        return self.tokens * self.kind.shape.hidden * self.itemsize

    @property
    def whole(self) -> float:
        """A matrix's output of all tokens before sequence parallelism divides it; else 0."""
        return self.gathered if self.sequence_parallel else 0.0

    @cached_property
    def norm(self) -> float:
        """What a norm stores: its output; if it computes in float32, its input too."""
        wide = _FLOAT / self.itemsize if self.kind.float32_norms else 0
        return self.stream * (1 + wide) * (2 if self.kind.shape.sandwich_norms else 1)

    @cached_property
    def attention(self) -> Part:
        """Queries, keys, values, rotary angles, output and, if materialised, scores."""
        if self.kind.shape.mla is not None:
            return self._latent_attention()
        s, b, t = self.kind.shape, self.itemsize, self.tokens
        q = t * b * s.heads // self.layout.tp * s.head_dim
        kv = t * b * max(1, s.kv_heads // self.layout.tp) * s.head_dim
        # the projection is one tensor, of which the values stay a view
        mixed = q + 2 * kv
        # cosine and sine, each for queries and for keys; Transformer Engine's kernel needs neither
        angles = 0 if self.kind.transformer_engine else 4 * t * b * s.head_dim
        lse = t * _FLOAT * s.heads / self.layout.tp
        if self.kind.softcap:
            return self._scores(q, kv, mixed, angles)
        kept = angles + mixed + q + kv + q + lse
        # rotated queries and keys beside the projection, then the output and its projection
        exchanged = self._exchanged(q, 2 * kv, trained=False)
        forward = mixed + q + kv + max(exchanged, q + self.whole)
        # gradients of the output, of queries, keys and values
        backward = q + q + 2 * kv + self._exchanged(q, 2 * kv, trained=True)
        return Part(kept, forward, backward)

    def _scores(self, q: float, kv: float, mixed: float, angles: float) -> Part:
        """Attention that materialises its scores (``softcapped_attention``)."""
        b = self.itemsize
        scores = self.tokens * self.longest * self.kind.shape.heads / self.layout.tp
        # keys and values repeated for all heads, a copy of the queries, the output
        heads = 4 * q
        # tanh of the scores, softmax in float32, and the softmax in the model's type
        kept = angles + heads + scores * (b + _FLOAT + b)
        # scores and their tanh; masked scores in float32, and their softmax
        forward = mixed + 2 * q + kv + 2 * q + scores * (2 * b + 2 * _FLOAT)
        # gradients of the softmax and of its input in float32, and one in the model's type
        backward = 2 * q + scores * (2 * _FLOAT + b)
        return Part(kept, forward, backward)

    def _latent_attention(self) -> Part:
        """Multi-head latent attention: keys and values are expanded to all heads."""
        s, b, t = self.kind.shape, self.itemsize, self.tokens
        mla = s.mla
        assert mla is not None
        heads = s.heads / self.layout.tp
        key = t * b * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        value = t * b * heads * mla.v_head_dim
        # compressed queries and keys with their norms' outputs, divided by sequence parallelism
        ranks = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        compressed = 2 * self.stream / s.hidden * ranks
        angles = 4 * t * b * mla.qk_rope_head_dim
        lse = t * _FLOAT * heads
        kept = compressed + angles + 2 * key + 2 * value + lse
        own = 2 * key + 2 * value
        exchanged = self._exchanged(key, key + value, trained=False)
        forward = compressed / 2 + own + max(exchanged, self.whole)
        backward = own + self._exchanged(key, key + value, trained=True)
        return Part(kept, forward, backward)

    def _exchanged(self, queries: float, key_value: float, trained: bool) -> float:
        """What context parallelism adds at the peak of one layer.

        ``all_gather`` holds keys and values of all ranks as received and in sequence order; then a
        contiguous copy of one of the two, or in a backward pass the gradients of both. ``p2p``
        holds the keys and values of one rank and of the next; besides, three float32 outputs, or in
        a backward pass four times as many float32 gradients as keys and values (measured by
        ``benchmarks/context_gather.py``).
        """
        cp = self.layout.cp
        if cp == 1:
            return 0.0
        if self.kind.transformer_engine and self.megatron.cp_comm_type != "all_gather":
            if trained:  # the keys and values, their gradients and those of a step, of two ranks
                return 4 * key_value + queries
            # contiguous values; the keys and values of all ranks; an output of each step, for half
            # of the queries where a rank's keys come after them; half of the queries; the output
            return (0.5 + cp) * key_value + ((cp + 1) / 2 + 1.5) * queries
        if self.megatron.key_exchange(self.kind.shape.mla is not None) == "all_gather":
            return (3 if trained else 2.5) * cp * key_value
        wide = _FLOAT / self.itemsize
        return 2 * key_value + wide * (4 * key_value if trained else 3 * queries)

    @cached_property
    def feed_forward(self) -> Part:
        """A dense feed-forward, or a mixture with its shared experts."""
        s = self.kind.shape
        if not self.sparse:
            return self._dense(s.ffn)
        shared = self._dense(s.shared_ffn)
        routed = self._routed()
        # shared experts run first; their output waits for the routed ones'
        return Part(
            shared.kept + routed.kept,
            self.stream + max(shared.forward, routed.forward),
            max(routed.backward, shared.backward),
        )

    def _dense(self, ffn: int) -> Part:
        f = self.tokens * self.itemsize * ffn / self.layout.tp
        # the product's gradient; its weight's gradient, which Transformer Engine adds to Megatron's
        # buffer; the output's gradient of all tokens
        weight = self.kind.shape.hidden * ffn / self.layout.tp * self.itemsize
        if self.kind.transformer_engine:
            weight = 0
        product = f + weight + self.whole
        if not self.kind.shape.gated:
            # the projection with its bias, which ReLU does not need again, and the product;
            # in the forward pass also the projection without its bias
            kept = f if self.kind.activation == "relu" else 2 * f
            return Part(kept, max(2 * f, f + self.whole), product)
        if self.kind.activation != "silu":  # no fused gated form here
            # projection; GELU of the gate, the shifted up projection, their product
            # in backward the product is freed, then its gradient and those of its factors exist
            return Part(5 * f, max(5 * f, f + self.whole), max(product, 3 * f - f))
        # projection and product, in the forward pass also SiLU of the gate; in backward the product
        # is freed before its gradient's two halves are joined
        return Part(3 * f, max(4 * f, f + self.whole), max(product, 5 * f - f))

    def _routed(self) -> Part:
        """Routed experts for an even load: tokens sorted by expert (``SortedExperts``)."""
        s, b = self.kind.shape, self.itemsize
        share = self.tokens / self.layout.tp if self.sequence_parallel else self.tokens
        rows = share * self.kind.active_experts * self.layout.etp
        tokens, f = rows * s.hidden * b, rows * s.expert_ffn / self.layout.etp * b
        wide = f * _FLOAT / b  # weighted by the router's float32 weights
        experts = s.num_experts / self.layout.ep * s.expert_ffn / self.layout.etp
        # of all the layer's experts; Transformer Engine adds them to Megatron's buffer
        gradients = 0 if self.kind.transformer_engine else experts * 3 * s.hidden * b
        # sorted tokens and the outputs of the first product
        kept = tokens + 2 * f
        # as permuted, as received and as sorted, beside the experts' own
        forward = 3 * tokens + 2 * f + f + wide
        # the output's gradient; activated, weighted and both gradients; that of the first product;
        # the tokens' gradient; gradients of the weights
        backward = tokens + 4 * f + 2 * f + tokens + gradients
        return Part(kept, forward, backward)

    @property
    def kept(self) -> float:
        """Stored from forward to backward pass without recomputation, the input included."""
        return self.stored + self.stream

    @property
    def stored(self) -> float:
        """The same without the layer's input: both norms, both halves, the sum between them."""
        return 2 * self.norm + self.stream + self.attention.kept + self.feed_forward.kept

    @property
    def forward(self) -> float:
        # Transformer Engine frees a norm's output with the product that follows
        before, after = (2, 4) if self.kind.transformer_engine else (4, 4)
        return max(before * self.stream + self.attention.forward,
                   after * self.stream + self.feed_forward.forward)  # fmt: skip

    @property
    def backward(self) -> float:
        """Most allocated at once in the backward pass beyond ``stored``: first the feed-forward's,
        then the attention's without what the feed-forward had stored."""
        freed = self.feed_forward.kept + self.norm
        return self.stream + max(self.feed_forward.backward, self.attention.backward - freed)
