"""RMSNorm for machines without Transformer Engine, sequence-parallel and zero-centred too."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension.

    ``y = x / rms(x) * w``, or ``* (1 + w)`` where the configuration says
    ``layernorm_zero_centered_gamma`` (Gemma keeps its weights that way; they are stored as they are
    in the checkpoint). Computed in float32, returned in the input's dtype, like Hugging Face's.

    Args:
        config: its ``sequence_parallel`` marks the weight for the gradient all-reduce over TP.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape ``[..., hidden_size]``."""
        if self.zero_centered:
            weight = 1.0 + self.weight.float()
            scaled = x.float()
            return torch.rms_norm(scaled, weight.shape, weight, self.eps).to(x.dtype)
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
