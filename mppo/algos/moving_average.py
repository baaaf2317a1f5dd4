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
    """``average = decay * average + (1 - decay) * weight``, in place, once per optimizer step.

    Args:
        averages: float32 tensors, any device.
        weights: the current weights, same order and shapes, any dtype and device.
        decay: with 0 the average becomes the weights, with 1 it does not change.
    """
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.to(average.device, average.dtype), 1.0 - decay)
