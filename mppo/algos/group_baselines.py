"""Critic-free advantages: one number per response, from the scores of its group.

A group is the set of responses to one prompt. Shapes: ``B`` responses. Responses with equal
integers in ``group_B`` form one group, in any order. A group of one has no baseline to subtract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo import register
from mppo.algos.masked import unique_index


class ResponseGroups:
    """The groups of a batch: sums, maxima and means over the group of each response, ``size_B`` is
    its size."""

    def __init__(self, group_B: Tensor, dtype: torch.dtype) -> None:
        _, self._index_B, size_G = unique_index(group_B)
        self.size_B = size_G[self._index_B].to(dtype)
        self._count = len(size_G)

    def sum(self, x_B: Tensor) -> Tensor:
        """Sums of float ``[B, ...]``, in the same shape."""
        zeros = x_B.new_zeros(self._count, *x_B.shape[1:])
        return zeros.index_add(0, self._index_B, x_B)[self._index_B]

    def max(self, x_B: Tensor) -> Tensor:
        lowest = x_B.new_full((self._count,), -torch.inf)
        return lowest.scatter_reduce(0, self._index_B, x_B, "amax")[self._index_B]

    def mean(self, x_B: Tensor) -> Tensor:
        """Mean over each member's group, 0 for a group of one: float ``[B]``."""
        return torch.where(self.size_B > 1, self.sum(x_B) / self.size_B, 0.0)


def group_mean(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Mean score of each response's group, 0 for a group of one: float ``[B]``."""
    return ResponseGroups(group_B, scores_B.dtype).mean(scores_B)


def group_std(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Unbiased standard deviation of each response's group, 1 for a group of one: ``[B]``."""
    groups = ResponseGroups(group_B, scores_B.dtype)
    squares_B = (scores_B - groups.mean(scores_B)).square()
    std_B = (groups.sum(squares_B) / (groups.size_B - 1).clamp(min=1.0)).sqrt()
    return torch.where(groups.size_B > 1, std_B, 1.0)


def grpo(scores_B: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    """``(R - mean) / (std + 1e-6)``, or ``R - mean`` (Dr. GRPO). Group of one: mean 0, std 1.

    With ``by_std``, the unbiased deviation; the constant keeps a group of equal scores finite (and
    0).
    Source: https://arxiv.org/abs/2402.03300; Dr. GRPO https://arxiv.org/abs/2503.20783; verl
    ``compute_grpo_outcome_advantage``.
    """
    centered_B = scores_B - group_mean(scores_B, group_B)
    return centered_B / (group_std(scores_B, group_B) + 1e-6) if by_std else centered_B


def gdpo(parts_BK: Tensor, group_B: Tensor, weight_K: Tensor, by_std: bool) -> Tensor:
    """``sum_k w_k A_k`` with :func:`grpo`'s advantage A_k of each part ``[B, K]`` of the reward,
    before whitening. Source: https://arxiv.org/abs/2601.05242; verl
    ``compute_gdpo_outcome_advantage``."""
    parts = [grpo(part_B, group_B, by_std) for part_B in parts_BK.unbind(1)]
    return torch.stack(parts, 1) @ weight_K.to(parts_BK.dtype)


def grpo_passk(scores_B: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    """``R - second largest R of the group`` for the best response, 0 for all others: pass@k.

    Two best responses of equal score have 0 too, and so has a group of one. With ``by_std``,
    divided by the group's unbiased standard deviation + 1e-6.
    Source: https://arxiv.org/abs/2503.19595; verl ``compute_grpo_passk_outcome_advantage``.
    """
    groups = ResponseGroups(group_B, scores_B.dtype)
    best_B = groups.max(scores_B)
    is_best_B = scores_B == best_B
    second_B = groups.max(torch.where(is_best_B, -torch.inf, scores_B))
    alone_B = is_best_B & (groups.sum(is_best_B.to(scores_B.dtype)) == 1) & (groups.size_B > 1)
    lead_B = torch.where(alone_B, best_B - second_B, 0.0)
    return lead_B / (group_std(scores_B, group_B) + 1e-6) if by_std else lead_B


def rloo(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """``R - mean of the others = n / (n - 1) (R - mean)``. Group of one: ``R``. Source:
    https://arxiv.org/abs/2402.14740; verl ``compute_rloo_outcome_advantage``."""
    size_B = ResponseGroups(group_B, scores_B.dtype).size_B
    factor_B = torch.where(size_B > 1, size_B / (size_B - 1).clamp(min=1.0), 1.0)
    return factor_B * (scores_B - group_mean(scores_B, group_B))


def rloo_vectorized(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """``(n R - sum) / (n - 1)``, equal to :func:`rloo`, but 0 for a group of one. Source: verl
    ``compute_rloo_vectorized_outcome_advantage``."""
    size_B = ResponseGroups(group_B, scores_B.dtype).size_B
    return torch.where(size_B > 1, rloo(scores_B, group_B), 0.0)


def mean_baseline(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """``R - mean`` (REINFORCE++-baseline, before its whitening). Group of one: ``R``.
    Source: https://arxiv.org/abs/2501.03262; verl
    ``compute_reinforce_plus_plus_baseline_outcome_advantage``.
    """
    return scores_B - group_mean(scores_B, group_B)


def opo(scores_B: Tensor, group_B: Tensor, length_B: Tensor) -> Tensor:
    """``R - sum(n_i R_i) / sum(n_i)``: a length-weighted baseline. Group of one: ``R``.

    A group of empty responses has baseline 0.
    Source: https://arxiv.org/abs/2505.23585; verl ``compute_opo_outcome_advantage``.
    """
    groups = ResponseGroups(group_B, scores_B.dtype)
    baseline_B = groups.sum(length_B * scores_B) / groups.sum(length_B).clamp(min=1.0)
    return scores_B - torch.where(groups.size_B > 1, baseline_B, 0.0)


def gpg(scores_B: Tensor, group_B: Tensor, f_norm: float = 1.0) -> Tensor:
    """``alpha (R - mean) / f_norm``, ``alpha`` = responses / responses of nonzero score. Source:
    https://arxiv.org/abs/2504.02546; verl ``compute_gpg_outcome_advantage``."""
    alpha = len(scores_B) / (scores_B != 0).sum().clamp(min=1)
    return alpha * mean_baseline(scores_B, group_B) / f_norm


@dataclass(frozen=True)
class OutcomeOptions:
    """Options: divide by the group's standard deviation (grpo, grpo_passk); divisor of gpg."""

    by_std: bool = True
    f_norm: float = 1.0


OutcomeEstimator = Callable[[Tensor, Tensor, Tensor, OutcomeOptions], Tensor]
"""``(scores_B, group_B, length_B, options) -> advantage_B``; length_B are response tokens."""

_OWN: dict[str, OutcomeEstimator] = {
    "grpo": lambda score, group, length, options: grpo(score, group, options.by_std),
    "grpo_passk": lambda score, group, length, options: grpo_passk(score, group, options.by_std),
    "dr_grpo": lambda score, group, length, options: grpo(score, group, False),
    "rloo": lambda score, group, length, options: rloo(score, group),
    "rloo_vectorized": lambda score, group, length, options: rloo_vectorized(score, group),
    "reinforce_plus_plus_baseline": lambda score, group, length, options: mean_baseline(
        score, group
    ),
    "opo": lambda score, group, length, options: opo(score, group, length),
    "gpg": lambda score, group, length, options: gpg(score, group, options.f_norm),
}
register.estimator.fill(_OWN)
