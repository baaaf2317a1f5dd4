"""The critic's regression loss per token."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped squared error: ``0.5 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)``.

    Args:
        values_T: the critic's current values, float ``[T]``.
        old_values_T: the critic's values before the update, float ``[T]``.
        returns_T: regression target, float ``[T]``.
        cliprange: ``e``; None: no clipping: ``0.5 (V - R)^2``.

    Returns:
        Loss, float ``[T]``; and 1 where the clipped term is larger, float ``[T]``.

    Source: https://arxiv.org/abs/1707.06347; verl ``compute_value_loss``; TRL.
    """
    unclipped_T = (values_T - returns_T).square()
    if cliprange is None:
        return 0.5 * unclipped_T, torch.zeros_like(values_T)
    clipped_values_T = torch.clamp(values_T, old_values_T - cliprange, old_values_T + cliprange)
    clipped_T = (clipped_values_T - returns_T).square()
    was_clipped_T = (clipped_T > unclipped_T).to(values_T.dtype)
    return 0.5 * torch.maximum(unclipped_T, clipped_T), was_clipped_T
