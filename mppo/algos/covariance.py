"""Token selection by the covariance of log-probability and advantage (Clip-Cov and KL-Cov).

``cov_t = (A_t - mean A) (log pi_t - mean log pi)``, the means over the masked tokens. Tokens are
selected over the mini-batch, before it is divided into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.masked import masked_mean


def covariance(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """``cov_t`` as defined above, 0 outside the mask: float ``[T]``."""
    centered_advantages_T = advantages_T - masked_mean(advantages_T, mask_T)
    centered_logprobs_T = logprobs_T - masked_mean(logprobs_T, mask_T)
    return torch.where(mask_T > 0, centered_advantages_T * centered_logprobs_T, 0.0)


def covariance_band(
    covariance_T: Tensor, mask_T: Tensor, ratio: float, low: float, high: float, seed: int
) -> Tensor:
    """Select masked tokens with ``low < cov < high`` at random (Clip-Cov).

    Args:
        covariance_T: float ``[T]``.
        mask_T: float ``[T]``.
        ratio: fraction of the masked tokens to select, at least one token.
        low, high: bounds of the covariance.
        seed: of the selection; equal seeds and inputs give equal selections on every rank.

    Returns:
        float ``[T]``, 1 on the selected tokens.
    """
    candidates = ((covariance_T > low) & (covariance_T < high) & (mask_T > 0)).nonzero().squeeze(1)
    count = min(max(int(ratio * mask_T.sum().item()), 1), len(candidates))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    selected_T = torch.zeros_like(covariance_T)
    selected_T[candidates[order[:count]]] = 1.0
    return selected_T


def covariance_top(covariance_T: Tensor, mask_T: Tensor, ratio: float) -> Tensor:
    """Select the masked tokens of largest covariance (KL-Cov).

    Args:
        covariance_T: float ``[T]``.
        mask_T: float ``[T]``.
        ratio: fraction of the masked tokens to select, at least one token; 0 selects none.

    Returns:
        float ``[T]``, 1 on the selected tokens.
    """
    selected_T = torch.zeros_like(covariance_T)
    num_tokens = int((mask_T > 0).sum())
    if ratio == 0 or num_tokens == 0:
        return selected_T
    count = min(max(int(ratio * num_tokens), 1), num_tokens)
    ranked_T = torch.where(mask_T > 0, covariance_T, -torch.inf)
    selected_T[ranked_T.topk(count).indices] = 1.0
    return selected_T
