"""Generalised advantage estimation and reward-to-go on a flat token axis.

Shapes: ``T`` tokens, ``B`` sequences. Tokens outside the mask (prompts, tool output inside a
response) are stepped over: the state after token t is the one before the next masked token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.scan import reverse_scan, uniform_reverse_scan

_PIECE = 1 << 18
"""Tokens whose temporaries stay in a core's cache."""

_ROW = 64


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
    if not isinstance(lam, Tensor):
        breaks = _run_breaks(mask_T, cu_seqlens)
        if breaks is not None:
            return _gae_of_runs(rewards_T, values_T, mask_T, breaks, gamma, lam)
    return _gae_of_tokens(rewards_T, values_T, mask_T, cu_seqlens, gamma, lam)


def _run_breaks(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Where nothing may cross from t + 1 to t, if masked tokens are one run in each sequence.

    Returns:
        Sorted int64 indices t: the mask changes after t, or a sequence ends with it. None where
        some sequence's masked tokens have a gap.
    """
    changes = []
    changed, ones = mask_T.new_zeros(_PIECE), mask_T.new_ones(_ROW)
    for start in range(0, len(mask_T) - 1, _PIECE):
        after = mask_T[start + 1 : start + 1 + _PIECE]
        step = torch.sub(after, mask_T[start : start + len(after)], out=changed[: len(after)])
        step.mul_(step)
        changed[len(after) :] = 0.0
        # most rows are without a change
        rows = torch.mv(changed.view(-1, _ROW), ones).nonzero().squeeze(1)
        row, column = changed.view(-1, _ROW)[rows].nonzero(as_tuple=True)
        changes.append(rows[row] * _ROW + column + start)
    last = cu_seqlens[1:] - 1
    breaks = torch.unique(torch.cat([*changes, last[last >= 0]]))
    run_ends = breaks[mask_T[breaks] > 0]
    run_sequences = torch.searchsorted(cu_seqlens, run_ends, right=True)
    if (run_sequences[1:] == run_sequences[:-1]).any():
        return None
    return breaks


def _gae_of_runs(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    breaks: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """GAE where each sequence's masked tokens are one run; one buffer, one pass over it."""

    def delta(start: int, stop: int, piece: Tensor) -> None:
        torch.sub(rewards_T[start:stop], values_T[start:stop], out=piece)
        following = values_T[start + 1 : stop + 1]
        piece[: len(following)].add_(following, alpha=gamma)
        here = slice(*torch.searchsorted(breaks, torch.tensor([start, stop])).tolist())
        crossed = breaks[here] - start
        piece[crossed] = rewards_T[breaks[here]] - values_T[breaks[here]]
        piece.mul_(mask_T[start:stop])

    return uniform_reverse_scan(delta, gamma * lam, breaks, values_T)


def _gae_of_tokens(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """GAE on any mask: gather the masked tokens, scan, put back."""
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
