"""Norms without Transformer Engine, with sequence parallelism and zero-centred weights."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def mark_sequence_parallel(parameter: torch.nn.Parameter, config: TransformerConfig) -> None:
    """Mark a parameter whose gradients Megatron sums over TP under sequence parallelism."""
    # an attribute that Megatron looks for and torch's Parameter does not declare
    vars(parameter)["sequence_parallel"] = config.sequence_parallel


class RMSNorm(torch.nn.Module):
    """``y = x / rms(x) * w`` over the last dimension; ``eps`` is added to the mean square. It is
    ``* (1 + w)`` if the configuration sets ``layernorm_zero_centered_gamma`` (Gemma's checkpoints
    store ``w``). It computes in float32 and returns the input's dtype, like Hugging Face's."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        mark_sequence_parallel(self.weight, config)

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:
            weight = 1.0 + self.weight.float()
            scaled = x.float()
            return torch.rms_norm(scaled, weight.shape, weight, self.eps).to(x.dtype)
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs
    ) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            mark_sequence_parallel(parameter, config)


NORMS: dict[str, type[torch.nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By Megatron's names (``TransformerConfig.normalization``)."""
