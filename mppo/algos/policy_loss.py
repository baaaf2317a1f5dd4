"""Policy losses, token by token. The caller aggregates.

``ratio = exp(clamp(log pi - log pi_old, -20, 20))``. Each loss returns the loss, float ``[T]``,
and two indicator tensors ``[T]``: where the upper/lower clip bit, and where the dual clip did.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

Loss = tuple[Tensor, Tensor, Tensor]


def importance_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """``(exp(d), d)`` with ``d = clamp(log pi - log pi_old, -20, 20)``: two float ``[T]``."""
    log_ratio_T = (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio_T.exp(), log_ratio_T


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual_clip: float | None
) -> Loss:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``; for A < 0 at most ``-A dual_clip``.

    Args:
        ratio_T: float ``[T]``.
        advantages_T: float ``[T]``.
        low, high: clip range; DAPO's clip-higher has ``high > low``.
        dual_clip: dual clip's c > 1, or None.

    Source: https://arxiv.org/abs/1707.06347; dual clip https://arxiv.org/abs/1912.09729;
    clip-higher https://arxiv.org/abs/2503.14476; verl ``compute_policy_loss_vanilla``.
    """
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high)
    loss_T = torch.maximum(plain_T, clipped_T)
    was_clipped_T = (clipped_T > plain_T).to(ratio_T.dtype)
    if dual_clip is None:
        return loss_T, was_clipped_T, torch.zeros_like(was_clipped_T)
    bound_T = -advantages_T * dual_clip
    negative_T = advantages_T < 0
    was_bounded_T = (negative_T & (loss_T > bound_T)).to(ratio_T.dtype)
    loss_T = torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T)
    return loss_T, was_clipped_T, was_bounded_T
