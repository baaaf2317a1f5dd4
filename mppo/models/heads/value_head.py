"""The value head, and the distribution of its initial weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.models.norm import mark_sequence_parallel
from mppo.recipe.sections.roles import ValueHeadInit

INITIALIZER_RANGE = 0.02
"""Transformers' value for a model whose config.json names none."""


class ValueHead(torch.nn.Module):
    """Linear outputs per token without bias, in float32; zero before :meth:`draw`. One of the
    ``bins`` is a value, more are the logits of a histogram of values."""

    def __init__(self, config: TransformerConfig, bins: int = 1) -> None:
        super().__init__()
        initial = torch.zeros(bins, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(initial)
        mark_sequence_parallel(self.weight, config)

    @torch.no_grad()
    def draw(self, std: float, seed: int) -> None:
        """Draw the weight from a normal distribution: the same numbers in every layout, and none
        that an embedded model draws from the same seed."""
        digest = hashlib.sha256(f"value head {seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        self.weight.copy_(std * torch.randn(self.weight.shape, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        """Outputs for hidden states ``[t, hidden]``: float32 ``[t, bins]``."""
        return hidden.float() @ self.weight.float().t()


def initial_std(init: ValueHeadInit, hf_config: Any) -> float:
    if init == "initializer_range":
        return getattr(hf_config, "initializer_range", INITIALIZER_RANGE)
    if init == "inverse_hidden":
        return 1 / (hf_config.hidden_size + 1)
    return init
