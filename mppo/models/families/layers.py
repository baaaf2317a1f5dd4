"""Megatron's transformer layer in other forms: of some families, and at the end of a model."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mppo.models.norm import RMSNorm


class SandwichLayer(TransformerLayer):
    """Megatron's layer with ``post_attention_layernorm`` and ``post_mlp_layernorm``.
    ``x = x + norm(attention(norm(x)))``, ``x = x + norm(mlp(norm(x)))``. Source: Gemma 2
    (https://arxiv.org/abs/2408.00118)."""

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = RMSNorm(config, size, eps)
        self.post_mlp_layernorm = RMSNorm(config, size, eps)
        self.self_attention.register_forward_hook(self._normalise_attention)
        self.mlp.register_forward_hook(self._normalise_mlp)

    def _normalise_attention(self, module, inputs, output: tuple[Tensor, Tensor | None]):
        hidden, bias = output
        return self.post_attention_layernorm(hidden), bias

    def _normalise_mlp(self, module, inputs, output: tuple[Tensor, Tensor | None]):
        hidden, bias = output
        return self.post_mlp_layernorm(hidden), bias


class ParallelLayer(TransformerLayer):
    """Megatron's layer with ``x = x + attention(norm_1(x)) + mlp(norm_2(x))``. Megatron adds each
    half to its residual; here the second half's norm (with Transformer Engine part of the first
    product) reads the layer's input instead of that sum. Source: GPT-NeoX-20B
    (https://arxiv.org/abs/2204.06745)."""

    _input: Tensor | None = None

    def _forward_attention(self, hidden_states: Tensor, *args, **kwargs):
        self._input = hidden_states
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Tensor:
        x, self._input = self._input, None
        return super()._forward_pre_mlp_layernorm(x)


class LastLayer(TransformerLayer):
    """Megatron's layer with the MLP restricted to the tokens whose outputs the head uses.

    Attention runs over all tokens. If the packing lists the N tokens (``logits_to_keep``), the
    output is ``[N, 1, hidden]``. Megatron's fused activations fail without a token, and every
    parameter needs a gradient before data-parallel ranks reduce it. Without a token to keep (an
    empty micro-batch, or a context-parallel rank with none of the responses) the MLP therefore
    computes one that nothing uses.
    """

    def forward(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        output, context = cast("tuple[Tensor, Tensor | None]", super().forward(*args, **kwargs))
        keep = _kept(kwargs)
        return output if keep is None or len(keep) else output[:0], context

    def _forward_attention(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        hidden, context = super()._forward_attention(*args, **kwargs)
        keep = _kept(kwargs)
        if keep is not None:
            hidden = hidden.index_select(0, keep if len(keep) else keep.new_zeros(1))
        return hidden, context


def _kept(arguments: dict[str, Any]) -> Tensor | None:
    params = arguments["packed_seq_params"]
    return getattr(params, "packing", params).logits_to_keep


def with_early_select(layers: list[ModuleSpec], config: TransformerConfig) -> list[ModuleSpec]:
    """Make the last layer of a model's last chunk a :class:`LastLayer`, if possible. Not in a
    mixture of experts, whose routing counts all tokens; nor if the layer has another class (Gemma
    2); nor under sequence parallelism, where ranks hold equally many tokens."""
    if not layers or config.sequence_parallel or layers[-1].module is not TransformerLayer:
        return layers
    submodules = layers[-1].submodules
    assert isinstance(submodules, TransformerLayerSubmodules)
    if getattr(submodules.mlp, "module", None) is MoELayer:
        return layers
    return [*layers[:-1], dataclasses.replace(layers[-1], module=LastLayer)]
