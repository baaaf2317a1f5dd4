"""The critic's loss per token: regression, or cross-entropy over a histogram of values.

Shapes: ``T`` tokens, ``K`` bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped squared error: ``0.5 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)``.

    ``e`` is ``cliprange``; None: no clipping, ``0.5 (V - R)^2``. Returns the loss, and 1 where the
    clipped term is larger.
    Source: https://arxiv.org/abs/1707.06347; verl ``compute_value_loss``; TRL.
    """
    unclipped_T = (values_T - returns_T).square()
    if cliprange is None:
        return 0.5 * unclipped_T, torch.zeros_like(values_T)
    clipped_values_T = torch.clamp(values_T, old_values_T - cliprange, old_values_T + cliprange)
    clipped_T = (clipped_values_T - returns_T).square()
    was_clipped_T = (clipped_T > unclipped_T).to(values_T.dtype)
    return 0.5 * torch.maximum(unclipped_T, clipped_T), was_clipped_T


def bin_edges(low: float, high: float, bins: int) -> Tensor:
    """Ends of equal bins of ``[low, high]``: float64 ``[K + 1]``."""
    return torch.linspace(low, high, bins + 1, dtype=torch.float64)


def hl_gauss_target(returns_T: Tensor, edges: Tensor, sigma: float) -> Tensor:
    """Probability of each bin under a normal distribution around the return, given the range.

    ``p_k = (F(e_{k+1}) - F(e_k)) / (F(e_K) - F(e_0))``, F the distribution function of
    ``N(R, sigma^2)``.

    e are ascending, float64 ``[K + 1]``; a return outside the range counts as the nearer end.
    Returns float32 ``[K, T]``, of sum 1 over the bins.
    Source: Farebrother et al. 2024, "Stop Regressing", https://arxiv.org/abs/2403.03950.
    """
    inside_T = returns_T.double().clamp(edges[0], edges[-1])
    cdf = torch.erf((edges[:, None] - inside_T) / (math.sqrt(2.0) * sigma))
    return ((cdf[1:] - cdf[:-1]) / (cdf[-1] - cdf[0])).float()


def hl_gauss_loss(
    logits_KT: Tensor, returns_T: Tensor, edges: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a histogram against the target: ``-sum_k p_k log softmax(logits)_k``.

    Logits are float ``[K, T]``. Returns the loss, and 1 where the return is outside the range, but
    for rounding (returns are computed as advantages plus values).
    Source: Farebrother et al. 2024, https://arxiv.org/abs/2403.03950.
    """
    target_KT = hl_gauss_target(returns_T, edges, sigma)
    loss_T = -(target_KT * torch.log_softmax(logits_KT, 0)).sum(0)
    slack = 1e-3 * (edges[1] - edges[0])
    outside_T = (returns_T < edges[0] - slack) | (returns_T > edges[-1] + slack)
    return loss_T, outside_T.to(loss_T.dtype)


def expected_value(logits_K: Tensor, edges: Tensor) -> Tensor:
    """Mean of a histogram ``[..., K]``: ``sum_k softmax(logits)_k c_k``, c the bins' centres.
    Source: Farebrother et al. 2024, https://arxiv.org/abs/2403.03950."""
    centres = ((edges[:-1] + edges[1:]) / 2).to(logits_K)
    return (torch.softmax(logits_K, -1) * centres).sum(-1)
