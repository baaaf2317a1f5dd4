"""Exponential moving average of weights.

Source: DeepSpeed-Chat ``moving_average`` and OpenRLHF ``--enable_ema``, both with 0.992.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def update_moving_average_(
    averages: Iterable[Tensor], weights: Iterable[Tensor], decay: float
) -> None:
    """``average = decay * average + (1 - decay) * weight`` in float32, in place, once per optimizer
    step; dtypes and devices may differ."""
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.to(average.device, average.dtype), 1.0 - decay)
