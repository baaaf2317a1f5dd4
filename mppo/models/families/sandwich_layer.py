"""Gemma 2's and GLM-4's layer: what attention and MLP add to the residual is normalised."""

from __future__ import annotations

from megatron.core.transformer.transformer_layer import TransformerLayer
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
