"""Generalised advantage estimation and reward-to-go on a flat token axis.

Shapes: ``T`` tokens, ``B`` sequences. Tokens outside the mask (prompts, tool output inside a
response) are stepped over: the state after token t is the one before the next masked token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 16


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """``y_i = x_i + decay_i y_{i+1}``, with nothing after the end.

    A decay of 0 ends a segment. Blocks of 16 are scanned by doubling, then the blocks' first
    elements are scanned in the same way: O(N) memory traffic times a small constant, no loop over
    elements.

    Args:
        x_N: float ``[N]``.
        decay_N: float ``[N]``.

    Returns:
        float ``[N]``.
    """
    n = len(x_N)
    if n == 0:
        return x_N.clone()
    padding = -n % _BLOCK
    y = torch.nn.functional.pad(x_N, (0, padding)).view(-1, _BLOCK)
    g = torch.nn.functional.pad(decay_N, (0, padding)).view(-1, _BLOCK)
    y, g = y.clone(), g.clone()
    step = 1
    while step < _BLOCK:
        y[:, :-step] += g[:, :-step] * y[:, step:]
        g[:, :-step] = g[:, :-step] * g[:, step:]
        step *= 2
    if len(y) > 1:
        first = reverse_scan(y[:, 0].contiguous(), g[:, 0].contiguous())
        y[:-1] += g[:-1] * first[1:].unsqueeze(1)
    return y.view(-1)[:n]


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``.

    Args:
        rewards_T: float ``[T]``.
        values_T: value of the state before each token, float ``[T]``.
        mask_T: float ``[T]``, 1 on response tokens; the others are stepped over, and ``t + 1``
            is the next masked token of the same sequence. After a sequence's last, V is 0.
        cu_seqlens: int64 ``[B + 1]``.
        gamma: discount.
        lam: GAE's lambda, one for all or float ``[B]``, one per sequence.

    Returns:
        Advantages, not whitened: float ``[T]``, 0 outside the mask. Returns are
        ``advantages + values``.

    Source: https://arxiv.org/abs/1506.02438; masked tokens as in verl
    ``compute_gae_advantage_return``.
    """
    kept = mask_T.nonzero().squeeze(1)
    advantages_T = torch.zeros_like(values_T)
    if len(kept) == 0:
        return advantages_T
    sequence_N = torch.searchsorted(cu_seqlens, kept, right=True) - 1
    goes_on_N = torch.zeros(len(kept), dtype=values_T.dtype, device=values_T.device)
    goes_on_N[:-1] = (sequence_N[1:] == sequence_N[:-1]).to(values_T.dtype)
    values_N = values_T[kept]
    next_values_N = torch.zeros_like(values_N)
    next_values_N[:-1] = values_N[1:]
    delta_N = rewards_T[kept] + gamma * next_values_N * goes_on_N - values_N
    lam_N = lam[sequence_N].to(values_T.dtype) if isinstance(lam, Tensor) else lam
    advantages_T[kept] = reverse_scan(delta_N, gamma * lam_N * goes_on_N)
    return advantages_T


def reward_to_go(rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` over the masked tokens; 0 outside the mask.

    Args and shapes as in :func:`gae`.
    """
    return gae(rewards_T, torch.zeros_like(rewards_T), mask_T, cu_seqlens, gamma, 1.0)


def length_adaptive_lambda(length_B: Tensor, alpha: float) -> Tensor:
    """``lam_b = 1 - 1 / (alpha n_b)``, held within [0, 1]; 0 for an empty response.

    Args:
        length_B: response tokens of each sequence, ``[B]``.
        alpha: larger alpha, longer horizon.

    Returns:
        float ``[B]``.

    Source: VAPO, https://arxiv.org/abs/2504.05118.
    """
    scaled_B = (alpha * length_B.to(torch.float32)).clamp(min=1.0)
    return torch.where(length_B > 0, 1.0 - 1.0 / scaled_B, 0.0)
