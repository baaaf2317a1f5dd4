"""GPT-NeoX's layer: attention and feed-forward both read the layer's input."""

from __future__ import annotations

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


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
