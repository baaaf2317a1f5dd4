"""Sums, means and whitening over the masked tokens of a flat axis.

Shapes: ``T`` tokens of all sequences, concatenated, ``B`` sequences, ``cu_seqlens`` ``[B + 1]``.
Every function returns finite numbers for an empty mask.

A batch may be shared out over ranks, each with the tokens of some sequences. A sum over all its
tokens is then made of the sums of sequences, taken in float64 where the tokens are, gathered, and
added in the order of the sequences: the result does not depend on who holds which sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

EPS = 1e-8
"""Added to a variance: keeps the result finite for a constant input."""
_unique = cast(Any, torch.unique)  # pyright: ignore[reportUnknownMemberType]  not annotated


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Gather:
    """How holders of some sequences' tokens learn numbers of all sequences: ``sequences`` maps
    ``[H, ...]`` of those held to ``[B, ...]`` of all, ``values`` concatenates their ``[N]``."""

    sequences: Callable[[Tensor], Tensor] = _unchanged
    values: Callable[[Tensor], Tensor] = _unchanged


ALONE = Gather()
"""One holder has all sequences."""


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations from it, maximum and minimum of some numbers; 0, 0, 0,
    -inf and inf for none."""

    count: float
    mean: float
    squares: float
    max: float
    min: float

    def var(self, unbiased: bool = True) -> float:
        """``squares / (n - 1)``, or ``/ n`` if biased; 0 for fewer than two numbers."""
        return self.squares / max(self.count - (1.0 if unbiased else 0.0), 1.0)


def sequence_moments(
    x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, with_range: bool = True
) -> Tensor:
    """Moments of each sequence's masked tokens, float64 ``[B, 5]`` on the CPU: the fields of
    :class:`Moments`, without ``with_range`` with max and min of no numbers. Values outside the
    mask, even NaN, are ignored."""
    inside_T = mask_T.cpu() > 0
    values_T = x_T.detach().cpu().double()
    count_B = sequence_sum(inside_T.double(), cu_seqlens)
    filled_T = torch.where(inside_T, values_T, 0.0)
    mean_B = sequence_sum(filled_T, cu_seqlens) / count_B.clamp(min=1.0)
    deviation_T = torch.where(inside_T, filled_T - expand_to_tokens(mean_B, cu_seqlens), 0.0)
    squares_B = sequence_sum(deviation_T.square(), cu_seqlens)
    max_B, min_B = torch.full_like(count_B, -math.inf), torch.full_like(count_B, math.inf)
    if with_range:
        highest_T = torch.where(inside_T, values_T, -math.inf)
        lowest_T = torch.where(inside_T, values_T, math.inf)
        max_B = torch.segment_reduce(highest_T, "max", offsets=cu_seqlens, initial=-math.inf)
        min_B = torch.segment_reduce(lowest_T, "min", offsets=cu_seqlens, initial=math.inf)
    return torch.stack([count_B, mean_B, squares_B, max_B, min_B], dim=1)


def merged_moments(moments_B: Tensor, weight_B: Tensor | None = None) -> Moments:
    """Moments of all sequences' tokens from those of each, where each token of sequence b has
    weight ``weight_B`` (None: 1). Source: Chan's parallel update."""
    if len(moments_B) == 0:
        return Moments(0.0, 0.0, 0.0, -math.inf, math.inf)
    count_B, mean_B, squares_B, max_B, min_B = moments_B.unbind(1)
    if weight_B is not None:
        count_B, squares_B = weight_B * count_B, weight_B * squares_B
    count = count_B.sum()
    mean = (count_B * mean_B).sum() / count.clamp(min=1.0)
    squares = (squares_B + count_B * (mean_B - mean).square()).sum()
    return Moments(*(number.item() for number in (count, mean, squares, max_B.max(), min_B.min())))


def unique_index(x_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct values ``[G]`` ascending, each element's index in them ``[N]``, counts ``[G]``."""
    found = _unique(x_N, return_inverse=True, return_counts=True)
    return cast("tuple[Tensor, Tensor, Tensor]", found)


def masked_whiten(
    x_T: Tensor,
    mask_T: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    moments: Moments | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(var + EPS)`` over the masked tokens, 0 outside the mask.

    Args:
        x_T: finite also outside the mask.
        shift_mean: False adds the mean back (rewards are scaled, not centred).
        unbiased: Bessel's correction (verl, TRL); OpenRLHF has none.
        moments: of the tokens to whiten over; None: of these.

    With fewer than two masked tokens the variance is undefined: the tokens are centred (so they
    become 0) and not scaled. Source: verl ``masked_whiten``; TRL ``masked_whiten``.
    """
    mask_T = mask_T.to(x_T.dtype)
    if moments is None:
        whole = torch.tensor([0, len(x_T)])
        moments = merged_moments(sequence_moments(x_T, mask_T, whole, with_range=False))
    scale = 1.0 / math.sqrt(moments.var(unbiased) + EPS) if moments.count >= 2 else 1.0
    whitened_T = (x_T - moments.mean) * mask_T * scale
    return whitened_T if shift_mean else whitened_T.add_(mask_T, alpha=moments.mean)


def masked_whiten_by_group(
    x_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_B: Tensor,
    unbiased: bool = True,
    gather: Gather = ALONE,
    held_H: Tensor | None = None,
) -> Tensor:
    """``(x - mean_g) / sqrt(var_g + EPS)`` over each group's masked tokens, 0 outside the mask.

    Sequences with equal numbers in ``group_B`` form a group (one prompt); ``held_H`` are the
    indices of those held (None: all). As in :func:`masked_whiten`, a group of fewer than two masked
    tokens is centred and not scaled. Sums are taken in float64. ``x_T`` is finite also outside the
    mask.
    """
    labels, index_B, _ = unique_index(group_B)

    def over_group(y_B: Tensor) -> Tensor:
        return y_B.new_zeros(len(labels)).index_add(0, index_B, y_B)

    moments_B = gather.sequences(sequence_moments(x_T, mask_T, cu_seqlens, with_range=False))
    count_B, sequence_mean_B, squares_B = moments_B[:, :3].unbind(1)
    count_G = over_group(count_B)
    mean_B = (over_group(count_B * sequence_mean_B) / count_G.clamp(min=1.0))[index_B]
    squares_G = over_group(squares_B + count_B * (sequence_mean_B - mean_B).square())
    divisor_G = (count_G - (1.0 if unbiased else 0.0)).clamp(min=1.0)
    scale_G = (squares_G / divisor_G + EPS).rsqrt()
    scale_B = torch.where(count_G >= 2, scale_G, 1.0)[index_B]
    mean_T, scale_T = (
        expand_to_tokens(y_B if held_H is None else y_B[held_H], cu_seqlens)
        for y_B in (mean_B, scale_B)
    )
    return ((x_T - mean_T) * mask_T * scale_T).to(x_T.dtype)


def sequence_sum(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence: ``[T] -> [B]``, 0 for an empty one. Differentiable."""
    return torch.segment_reduce(x_T, "sum", offsets=cu_seqlens, initial=0.0)


def sequence_mean(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over each sequence's masked tokens: ``[T] -> [B]``, 0 without a masked token."""
    count_B = sequence_sum(mask_T, cu_seqlens)
    return sequence_sum(x_T * mask_T, cu_seqlens) / count_B.clamp(min=1.0)


def expand_to_tokens(x_B: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Copy each sequence's value to all its tokens: ``[B] -> [T]``."""
    return torch.repeat_interleave(x_B, cu_seqlens.diff())


def last_masked_index(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Flat index of each sequence's last masked token: int64 ``[B]``, -1 without one."""
    index_T = torch.where(mask_T > 0, torch.arange(len(mask_T), device=mask_T.device), -1)
    last_B = torch.segment_reduce(index_T.double(), "max", offsets=cu_seqlens, initial=-1.0)
    return last_B.long()


def place_at_last(x_B: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Place each sequence's value at its last masked token: ``[B] -> [T]``, 0 elsewhere. The value
    of a sequence without a masked token is dropped."""
    last_B = last_masked_index(mask_T, cu_seqlens)
    has_token_B = last_B >= 0
    placed_T = torch.zeros(len(mask_T), dtype=x_B.dtype, device=x_B.device)
    placed_T[last_B[has_token_B]] = x_B[has_token_B]
    return placed_T
