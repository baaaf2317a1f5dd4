"""Token selection by the covariance of log-probability and advantage (Clip-Cov and KL-Cov).

``cov_t = (A_t - mean A) (log pi_t - mean log pi)``, the means over the masked tokens. Tokens are
selected over the mini-batch, before it is divided into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.masked import (
    ALONE,
    Gather,
    expand_to_tokens,
    merged_moments,
    sequence_moments,
    sequence_sum,
)


def covariance(
    logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    gather: Gather = ALONE,
) -> Tensor:
    """``cov_t`` as defined above, 0 outside the mask: float ``[T]``."""
    centered: list[Tensor] = []
    for x_T in (advantages_T, logprobs_T):
        moments_B = gather.sequences(sequence_moments(x_T, mask_T, cu_seqlens, with_range=False))
        centered.append(x_T - merged_moments(moments_B).mean)
    return torch.where(mask_T > 0, centered[0] * centered[1], 0.0)


@dataclass(frozen=True)
class MiniBatchTokens:
    """The masked tokens of a mini-batch, of which this holder may have a part; ``position_H`` is
    the position of each sequence held in the mini-batch."""

    mask_T: Tensor
    cu_seqlens: Tensor
    position_H: Tensor
    gather: Gather = ALONE

    @property
    def count(self) -> int:
        return int(self._per_sequence(self.mask_T > 0).sum())

    def number(self, chosen_T: Tensor) -> tuple[Tensor, int]:
        """Number the chosen tokens of the mini-batch in its order: int64 ``[T]``, -1 for others;
        and how many there are."""
        count_B = self._per_sequence(chosen_T)
        before_H = (count_B.cumsum(0) - count_B)[self.position_H]
        own_H = count_B[self.position_H]
        # the running count over the tokens here, from its value at each sequence's start
        here_T = chosen_T.long().cumsum(0) - 1
        shift_T = expand_to_tokens(before_H - (own_H.cumsum(0) - own_H), self.cu_seqlens)
        return torch.where(chosen_T, here_T + shift_T, -1), int(count_B.sum())

    def _per_sequence(self, chosen_T: Tensor) -> Tensor:
        return self.gather.sequences(sequence_sum(chosen_T.double(), self.cu_seqlens)).long()


def covariance_band(
    covariance_T: Tensor, tokens: MiniBatchTokens, ratio: float, low: float, high: float, seed: int
) -> Tensor:
    """Select a ``ratio`` of the masked tokens, at least one, at random from those with
    ``low < cov < high`` (Clip-Cov): float ``[T]``, 1 on them. Equal seeds and inputs give equal
    selections on every rank."""
    inside_T = (covariance_T > low) & (covariance_T < high) & (tokens.mask_T > 0)
    number_T, total = tokens.number(inside_T)
    count = min(max(int(ratio * tokens.count), 1), total)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return torch.isin(number_T, order[:count]).to(covariance_T.dtype)


def covariance_top(covariance_T: Tensor, tokens: MiniBatchTokens, ratio: float) -> Tensor:
    """Select a ``ratio`` of the masked tokens, at least one unless it is 0, of largest covariance
    (KL-Cov), of equal ones the first: float ``[T]``, 1 on them."""
    total = tokens.count
    if ratio == 0 or total == 0:
        return torch.zeros_like(covariance_T)
    count = min(max(int(ratio * total), 1), total)
    inside_T = tokens.mask_T > 0
    largest = covariance_T[inside_T]
    largest = tokens.gather.values(largest.topk(min(count, len(largest))).values)
    threshold = largest.topk(count).values[-1]
    above = int((largest > threshold).sum())
    number_T, _ = tokens.number((covariance_T == threshold) & inside_T)
    tied_T = (number_T >= 0) & (number_T < count - above)
    return (((covariance_T > threshold) & inside_T) | tied_T).to(covariance_T.dtype)
