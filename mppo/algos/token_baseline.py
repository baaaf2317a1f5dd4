"""Optimal token baselines: one baseline for each position of a prompt's responses.

Shapes: ``T`` tokens, ``B`` sequences, ``L`` positions; see :mod:`mppo.algos.masked`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.gae import reward_to_go
from mppo.algos.group_baselines import ResponseGroups
from mppo.algos.masked import ALONE, Gather


def path_variance(
    logprobs_T: Tensor, squares_T: Tensor, importance_T: Tensor | None = None
) -> Tensor:
    """``w_t = (1 - 2 pi_t + sum_v pi_v^2) rho_t^2``, the squared norm of a token's score, from
    log-probabilities, the sum of the vocabulary's squares, and importance weights rho (None: 1)."""
    variance_T = 1.0 - 2.0 * logprobs_T.exp() + squares_T
    return variance_T if importance_T is None else variance_T * importance_T.square()


def token_baseline(
    rewards_T: Tensor,
    variance_T: Tensor,
    mask_T: Tensor,
    place_T: Tensor,
    cu_seqlens: Tensor,
    group_B: Tensor,
    held_H: Tensor,
    gather: Gather = ALONE,
) -> tuple[Tensor, Tensor]:
    """``A_t = G_t - B_t`` with ``B_t = sum_i G_it W_it / (sum_i W_it + 1e-8)`` over the group.

    ``G`` is the reward to go and ``W_t = w_1 + ... + w_t``. B is 0 for a group of one, and on the
    positions of the one longest response from the second longest one's number of tokens on.

    ``place_T`` is the position of each token in its response, ``held_H`` are the sequences held,
    and ``variance_T`` is w. Returns advantages and G, float ``[T]``, 0 outside the mask.
    Source: verl ``compute_optimal_token_baseline_advantage``, and for the positions of the response
    tokens alone ``compute_multi_turn_optimal_token_baseline_advantage``.
    """
    returns_T = reward_to_go(rewards_T, mask_T, cu_seqlens, 1.0)
    inside = mask_T.nonzero()[:, 0]
    sequence_N, place_N = torch.searchsorted(cu_seqlens, inside, right=True) - 1, place_T[inside]
    counts_H = torch.zeros(len(cu_seqlens) - 1, 2, dtype=torch.float64)
    counts_H[:, 0].index_add_(0, sequence_N, torch.ones(len(inside), dtype=torch.float64))
    counts_H[:, 1].scatter_reduce_(0, sequence_N, place_N.double() + 1, "amax")
    length_B, span_B = gather.sequences(counts_H).unbind(1)
    positions = int(span_B.max()) if len(span_B) else 0

    def padded(x_T: Tensor) -> Tensor:
        x_HL = x_T.new_zeros(len(counts_H), positions)
        x_HL[sequence_N, place_N] = x_T[inside]
        return x_HL

    mask_HL = padded(mask_T)
    weight_HL = padded(variance_T).cumsum(1) * mask_HL
    sums_BL = gather.sequences(torch.stack([weight_HL * padded(returns_T), weight_HL], 1))
    baseline_BL = _group_baseline(sums_BL, length_B, group_B)
    advantages_T = torch.zeros_like(returns_T)
    advantages_T[inside] = returns_T[inside] - baseline_BL[held_H[sequence_N], place_N]
    return advantages_T, returns_T


def _group_baseline(sums_B2L: Tensor, length_B: Tensor, group_B: Tensor) -> Tensor:
    """The baseline of each response at each position: float ``[B, L]``."""
    groups = ResponseGroups(group_B, length_B.dtype)
    returns_BL, weight_BL = groups.sum(sums_B2L).unbind(1)
    baseline_BL = returns_BL / (weight_BL + 1e-8)
    longest_B = length_B == groups.max(length_B)
    alone_B = longest_B & (groups.sum(longest_B.double()) == 1)
    second_B = groups.max(torch.where(longest_B, -torch.inf, length_B))
    tail_BL = torch.arange(baseline_BL.shape[1]) >= second_B[:, None]
    unused_BL = (alone_B[:, None] & tail_BL) | (groups.size_B == 1)[:, None]
    return torch.where(unused_BL, 0.0, baseline_BL)
