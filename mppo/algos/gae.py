"""Generalised advantage estimation and reward-to-go on a flat token axis.

Shapes: ``T`` tokens, ``B`` sequences. Tokens outside the mask (prompts, tool output inside a
response) are skipped: the state after token t is the state before the next masked token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 32
"""Elements that ``reverse_scan`` scans one after the other; all blocks run side by side."""


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
        values_T: value of the state before each token.
        mask_T: 1 on response tokens; other tokens are skipped: ``t + 1`` is the next masked token
            of the same sequence. V is 0 after a sequence's last masked token.
        lam: lambda: one number, or float ``[B]``, one per sequence.

    Returns:
        Advantages, not whitened, 0 outside the mask. Returns are ``advantages + values``.
    Source: https://arxiv.org/abs/1506.02438; masked tokens as in verl
    ``compute_gae_advantage_return``.
    """
    kept = mask_T.nonzero().squeeze(1)
    advantages_T = torch.zeros_like(values_T)
    if len(kept) == 0:
        return advantages_T
    sequence_N = torch.searchsorted(cu_seqlens, kept, right=True) - 1
    # 1 where the next gathered token belongs to the same sequence
    continues_N = torch.zeros(len(kept), dtype=values_T.dtype, device=values_T.device)
    continues_N[:-1] = (sequence_N[1:] == sequence_N[:-1]).to(values_T.dtype)
    values_N = values_T[kept]
    next_values_N = torch.zeros_like(values_N)
    next_values_N[:-1] = values_N[1:]
    delta_N = rewards_T[kept] + gamma * next_values_N * continues_N - values_N
    lam_N = lam[sequence_N].to(values_T.dtype) if isinstance(lam, Tensor) else lam
    advantages_T[kept] = reverse_scan(delta_N, gamma * lam_N * continues_N)
    return advantages_T


def turn_starts(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """1 on the first token of every turn, a run of masked tokens of a sequence: float ``[T]``."""
    before_T = torch.zeros_like(mask_T)
    before_T[1:] = mask_T[:-1]
    starts = cu_seqlens[:-1]
    before_T[starts[starts < len(mask_T)]] = 0.0
    return mask_T * (before_T == 0)


def turn_gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    starts_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """:func:`gae` over turns: ``delta_k = R_k + gamma V_{k+1} - V_k``.

    R_k is the sum of the turn's rewards and V_k the value of the state before its first token. The
    discount is per turn. A masked token belongs to the turn that started last; every token of a
    turn has its advantage, 0 outside the mask.
    Source: Turn-PPO, https://arxiv.org/abs/2512.17008.
    """
    first = starts_T.nonzero().squeeze(1)
    if len(first) == 0:
        return torch.zeros_like(values_T)
    turn_T = (starts_T.cumsum(0).long() - 1).clamp(min=0)
    reward_K = torch.zeros(len(first), dtype=rewards_T.dtype, device=rewards_T.device)
    reward_K.index_add_(0, turn_T, rewards_T * mask_T)
    turn_rewards_T = torch.zeros_like(rewards_T)
    turn_rewards_T[first] = reward_K
    advantages_T = gae(turn_rewards_T, values_T, starts_T, cu_seqlens, gamma, lam)
    return advantages_T[first][turn_T] * mask_T


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """``y_i = x_i + decay_i y_{i+1}``, with 0 after the last element; a decay of 0 ends a segment.
    All blocks of 32 are scanned side by side, then the blocks' first elements in the same way,
    recursively: O(N) work."""
    n = len(x_N)
    if n == 0:
        return x_N.clone()
    # one block per column, so that a step of the scan is one operation on contiguous memory
    y, decay = (
        torch.nn.functional.pad(part_N, (0, -n % _BLOCK)).view(-1, _BLOCK).t().contiguous()
        for part_N in (x_N, decay_N)
    )
    for row in reversed(range(_BLOCK - 1)):
        y[row].addcmul_(decay[row], y[row + 1])
        decay[row].mul_(decay[row + 1])  # the product to the block's end
    if y.shape[1] > 1:
        # y[0] is each block's scan without the blocks after it; scanning y[0] completes it
        first = reverse_scan(y[0], decay[0])
        y[:, :-1].addcmul_(decay[:, :-1], first[1:])
    return y.t().reshape(-1)[:n]


def reward_to_go(rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` over the masked tokens; 0 outside the mask."""
    return gae(rewards_T, torch.zeros_like(rewards_T), mask_T, cu_seqlens, gamma, 1.0)


def length_adaptive_lambda(length_B: Tensor, alpha: float) -> Tensor:
    """``lam_b = 1 - 1 / (alpha n_b)`` for n_b response tokens, clamped to [0, 1]; 0 for an empty
    response. float64 ``[B]``: a power of a number that is nearly 1 needs its digits. Source: VAPO,
    https://arxiv.org/abs/2504.05118."""
    scaled_B = (alpha * length_B.to(torch.float64)).clamp(min=1.0)
    return torch.where(length_B > 0, 1.0 - 1.0 / scaled_B, 0.0)


def tokens_after(length_B: Tensor, episode_B: Tensor) -> Tensor:
    """Tokens that an episode generated in the sequences after each of its sequences, int64 ``[B]``.
    Episodes have numbers from 0 without gaps, and their sequences are in order of time."""
    order_B = torch.argsort(episode_B, stable=True)
    ends_B = length_B[order_B].cumsum(0)
    last_E = torch.bincount(episode_B).cumsum(0) - 1
    after_B = torch.empty_like(ends_B)
    after_B[order_B] = ends_B[last_E[episode_B[order_B]]] - ends_B
    return after_B


def segment_credit(after_B: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """``(gamma lam_b)^N_b``: what is left of a segment's advantage after the later segments, with N
    of :func:`tokens_after`. float64 ``[B]``, 1 for an episode's last segment. Source: CompactionRL,
    https://arxiv.org/abs/2607.05378."""
    base_B = torch.as_tensor(gamma * lam, dtype=torch.float64).expand(len(after_B))
    return base_B.pow(after_B)
