"""Bytes that the passes of one role allocate on one rank besides what it keeps between steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mppo.parallel.layout import Layout
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.routes import kept_sends
from mppo.planning.activations import Layer, ModelKind
from mppo.planning.transformer_engine import kept_tensors
from mppo.recipe.sections.role_config import RoleConfig
from mppo.weights.blocks import padded_vocab_size

_FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a micro-batch over all context-parallel ranks, if every sequence has the greatest
    length: in training, and in forward-only passes (of a role without any, as in training)."""

    training: int
    forward: int
    sequence: int
    response: int


@dataclass(frozen=True)
class StagePasses:
    """The passes of one role on one pipeline stage.

    Args:
        micro_batches: micro-batches of a mini-batch.
        itemsize: bytes of an element of the weights and activations.
        overlaps_updates: mini-batches follow each other without a gap, and actor and critic are
            updated together.
        streams_forward: forward-only passes of all roles run through one pipeline.
        trains_gathering: a matrix that gathers its input is trained.
    """

    role: RoleConfig
    kind: ModelKind
    layout: Layout
    stage: int
    layers: Sequence[int]
    lengths: Lengths
    micro_batches: int
    mini_batches: int
    itemsize: int
    overlaps_updates: bool
    streams_forward: bool
    trains_gathering: bool

    def layer(self, layer: int, training: bool = True) -> Layer:
        """The activations of a decoder layer for a micro-batch in training or in a forward pass."""
        sparse = self.kind.shape.sparse_layers
        tokens = self.lengths.training if training else self.lengths.forward
        return Layer(
            self.kind,
            self.role.megatron,
            self.layout,
            bool(sparse and sparse[layer]),
            tokens / self.layout.cp,
            self.lengths.sequence,
            self.itemsize,
        )

    @cached_property
    def _training(self) -> list[Layer]:
        return [self.layer(layer) for layer in self.layers]

    @cached_property
    def _forward(self) -> list[Layer]:
        return [self.layer(layer, training=False) for layer in self.layers]

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def has_experts(self) -> bool:
        return any(layer.sparse for layer in self._training)

    @property
    def trained(self) -> bool:
        return self.role.trained

    @property
    def buffers(self) -> dict[Hashable, int]:
        """Bytes of the layers' permanent buffers: those of Transformer Engine, or the one in which
        Megatron's sequence parallelism gathers a matrix's input. Roles on a rank share a buffer
        that they have in common; it is as large as the largest."""
        if self.kind.transformer_engine:
            sparse = [layer.sparse for layer in self._training]
            return kept_tensors(self.kind.shape, self.layout, sparse, self.trained, self.itemsize)
        widest = max(self._forward[0], self._training[0], key=lambda layer: layer.tokens)
        # Megatron keeps one for each layout with trained weights that gather
        keeps = widest.sequence_parallel and self.trained and self.trains_gathering
        return {self.layout: int(widest.gathered)} if keeps else {}

    @property
    def chunk(self) -> float:
        return 1 / self.layout.vpp

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the stage holds at once (Narayanan et al. 2021), of one
        mini-batch unless updates overlap."""
        work = RoleWork("", (), chunks=self.layout.vpp)
        most = work.most_in_flight(self.stage, self.layout.pp) * self.chunk
        return most if self.overlaps_updates else min(most, self.micro_batches)

    @property
    def kept(self) -> float:
        """Bytes of one micro-batch between its forward and its backward pass, of all chunks."""
        layers, megatron = self._training, self.role.megatron
        stream = layers[0].stream
        outputs = stream * (self.layout.vpp - self.is_last)
        outputs += self._angles(self.lengths.training) * self.layout.vpp
        if megatron.offload_activations:
            return outputs
        if megatron.recompute_granularity == "full":
            return len(layers) * stream + outputs
        return sum(layer.kept for layer in layers) + outputs

    @cached_property
    def update(self) -> int:
        """Most bytes of forward and backward pass of a chunk, what ``kept`` counts of it included:
        at the backward pass of a layer, of the head, or of the embedding."""
        layers, megatron = self._training, self.role.megatron
        stream = layers[0].stream
        recomputes = megatron.recompute_granularity == "full" or megatron.offload_activations
        at_layer = max(layer.backward + layer.stored * recomputes for layer in layers)
        kept = self.kept * self.chunk
        moments = [kept + at_layer]
        if self.is_last and self.role.head != "value":
            moments.append(kept + self._head(self.lengths.training, trained=True))
        if self.stage == 0:
            rows = padded_vocab_size(self.kind.shape.vocab, self.layout.tp) // self.layout.tp
            gradient = rows * self.kind.shape.hidden * self.itemsize
            moments.append(layers[0].gathered + gradient)
        return int(max(moments) + self._messages * stream)

    @property
    def _messages(self) -> int:
        """Gradients that arrive in an update, or are on their way to the previous stage."""
        pp, is_interleaved = self.layout.pp, self.layout.vpp > 1
        if pp == 1:
            return 0
        _, sent = kept_sends(self.stage, pp, self.layout.vpp)
        arriving = is_interleaved or not self.is_last
        return arriving + sent * (is_interleaved or self.stage > 0)

    @cached_property
    def forward(self) -> int:
        layers = self._forward
        moments = [layer.forward for layer in layers]
        if self.is_last and self.role.head != "value":
            # with Transformer Engine, the last layer's input too
            streams = 3 if self.kind.transformer_engine else 2
            head = streams * layers[0].stream + self._head(self.lengths.forward, trained=False)
            if layers[0].sequence_parallel and not (self.trained or self.kind.transformer_engine):
                head += layers[0].gathered  # frozen weights keep no buffer for it
            moments.append(head)
        return int(max(moments) + self._angles(self.lengths.forward))

    @property
    def sent(self) -> int:
        """Bytes of a forward-only pass's outputs on their way to the next stage."""
        is_interleaved = self.layout.vpp > 1
        if self.is_last and not is_interleaved:
            return 0
        count, _ = kept_sends(self.stage, self.layout.pp, self.layout.vpp)
        return int(count * self._forward[0].stream)

    def _angles(self, micro_batch: int) -> float:
        """Rotary angles of a micro-batch in float32. Transformer Engine's kernel takes those of the
        longest sequence; latent attention does not use it."""
        shape = self.kind.shape
        if shape.mla is not None:
            return micro_batch / self.layout.cp * _FLOAT * shape.mla.qk_rope_head_dim
        by_token = not self.kind.transformer_engine
        tokens = micro_batch / self.layout.cp if by_token else self.lengths.sequence
        return tokens * _FLOAT * shape.head_dim

    def _head(self, micro_batch: int, trained: bool) -> float:
        """The vocabulary projection over a chunk of tokens (``mppo.models.heads.vocabulary``)."""
        shape, b = self.kind.shape, self.itemsize
        predicted = micro_batch // self.lengths.sequence * self.lengths.response / self.layout.cp
        chunk = min(self.role.batching.head_chunk_tokens, predicted)
        rows = padded_vocab_size(shape.vocab, self.layout.tp) // self.layout.tp
        states = predicted * shape.hidden * b
        if not trained:
            # logits and their exponentials; with a soft-cap tanh, its square and the slope too
            return states + chunk * rows * _FLOAT * (4 if self.kind.logit_softcap else 2)
        # logits, probabilities, the soft-cap's slope, the gradient in the weights' type
        wide = 3 if self.kind.logit_softcap else 2
        logits = chunk * rows * (wide * _FLOAT + b)
        # the weights' gradient, summed in float32, and that of a chunk
        return 2 * states + logits + rows * shape.hidden * (_FLOAT + b)
