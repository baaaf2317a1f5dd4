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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mppo.algos.unique import unique_index

_PIECE = 1 << 18
"""Tokens per piece of a pass over memory: a piece fits a core's cache."""


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Gather:
    """How the holders of some sequences' tokens learn numbers of all sequences.

    Args:
        sequences: maps a tensor ``[H, ...]`` of the held sequences to ``[B, ...]`` of all.
        values: concatenates the holders' tensors ``[N]``.
    """

    sequences: Callable[[Tensor], Tensor] = _unchanged
    values: Callable[[Tensor], Tensor] = _unchanged


ALONE = Gather()
"""One holder has all sequences."""


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations from it, maximum and minimum of some numbers.

    Args:
        count, mean, squares: of all numbers; 0 for no numbers.
        max, min: -inf and inf for no numbers.
    """

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
    """Moments of each sequence's masked tokens; on the CPU.

    Args:
        x_T: float ``[T]``; values outside the mask, even NaN, are ignored.
        mask_T: float ``[T]``, 0 or 1.
        cu_seqlens: int64 ``[B + 1]``.
        with_range: compute maximum and minimum; otherwise these are those of no numbers.

    Returns:
        float64 ``[B, 5]``: the fields of :class:`Moments`.
    """
    bounds = cu_seqlens.numpy()
    moments = np.zeros((len(bounds) - 1, 5))
    moments[:, 3:] = -math.inf, math.inf
    values, mask, first = x_T.detach().numpy(), mask_T.numpy(), 0
    while first < len(moments):
        # as many sequences as fit a core's cache, at least one
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + _PIECE)) - 1)
        part, cut = slice(first, last), slice(bounds[first], bounds[last])
        lengths = np.diff(bounds[first : last + 1])
        _fill_moments(moments[part], values[cut], mask[cut] > 0, lengths, with_range)
        first = last
    return torch.as_tensor(moments)


def _fill_moments(
    moments: NDArray[np.float64],
    values: NDArray[Any],
    inside: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    with_range: bool,
) -> None:
    """Write the moments of consecutive sequences of these lengths."""
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return
    starts = (np.cumsum(lengths) - lengths)[filled]
    count = np.add.reduceat(inside, starts, dtype=np.int64)
    x = np.where(inside, values, 0.0).astype(np.float64)
    mean = np.add.reduceat(x, starts) / np.maximum(count, 1)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values: not finite moments
        x -= np.repeat(mean, lengths[filled])
        x *= inside
        x *= x
        squares = np.add.reduceat(x, starts)
    moments[filled, :3] = np.stack([count, mean, squares], axis=1)
    if with_range:
        for column, extreme, nothing in ((3, np.maximum, -math.inf), (4, np.minimum, math.inf)):
            moments[filled, column] = extreme.reduceat(np.where(inside, values, nothing), starts)


def merged_moments(moments_B: Tensor) -> Moments:
    """Moments of all sequences' tokens, from those of each: float64 ``[B, 5]``.

    Source: Chan's parallel update.
    """
    if len(moments_B) == 0:
        return Moments(0.0, 0.0, 0.0, -math.inf, math.inf)
    count_B, mean_B, squares_B, max_B, min_B = moments_B.unbind(1)
    count = count_B.sum()
    mean = (count_B * mean_B).sum() / count.clamp(min=1.0)
    squares = (squares_B + count_B * (mean_B - mean).square()).sum()
    return Moments(*(number.item() for number in (count, mean, squares, max_B.max(), min_B.min())))


def masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum of ``x`` where ``mask`` is 1; values outside the mask, even NaN, are ignored."""
    return torch.where(mask_T > 0, x_T * mask_T, 0.0).sum()


def masked_whiten(
    x_T: Tensor,
    mask_T: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    out: Tensor | None = None,
    moments: Moments | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the masked tokens, 0 outside the mask.

    Args:
        x_T: float ``[T]``, finite also outside the mask.
        mask_T: float ``[T]``, 0 or 1.
        shift_mean: False adds the mean back (rewards are scaled, not centred).
        unbiased: Bessel's correction (verl, TRL); OpenRLHF has none.
        eps: keeps the result finite for a constant input.
        out: result tensor; may be ``x_T`` itself, which saves an allocation.
        moments: of the tokens to whiten over; None: of these.

    Returns:
        float ``[T]``. With fewer than two masked tokens the variance is undefined: the tokens are
        centred (so they become 0) and not scaled.

    Source: verl ``masked_whiten``; TRL ``masked_whiten``.
    """
    mask_T = mask_T.to(x_T.dtype)
    if moments is None:
        pieces = torch.arange(0, len(x_T) + _PIECE, _PIECE).clamp(max=len(x_T))
        moments = merged_moments(sequence_moments(x_T, mask_T, pieces, with_range=False))
    mean, scale = moments.mean, 1.0
    if moments.count >= 2:
        scale = 1.0 / math.sqrt(moments.var(unbiased) + eps)
    whitened_T = torch.empty_like(x_T) if out is None else out
    cuts = (torch.split(tensor, _PIECE) for tensor in (x_T, mask_T, whitened_T))
    zero = x_T.new_zeros(())
    # elementwise, so out may be x_T itself
    for x, mask, whitened in zip(*cuts, strict=True):
        torch.addcmul(zero, torch.sub(x, mean, out=whitened), mask, value=scale, out=whitened)
        if not shift_mean:
            whitened.add_(mask, alpha=mean)
    return whitened_T


def masked_whiten_by_group(
    x_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_B: Tensor,
    unbiased: bool = True,
    eps: float = 1e-8,
    gather: Gather = ALONE,
    held_H: Tensor | None = None,
) -> Tensor:
    """``(x - mean_g) / sqrt(var_g + eps)`` over each group's masked tokens, 0 outside the mask.

    Args:
        x_T: float ``[T]``, finite also outside the mask.
        mask_T: float ``[T]``, 0 or 1.
        cu_seqlens: int64 ``[H + 1]``, of the sequences held.
        group_B: int64 ``[B]``; sequences with equal numbers form a group (one prompt).
        unbiased: Bessel's correction.
        eps: keeps the result finite, and 0, for a group of equal values.
        gather: of the batch.
        held_H: int64 ``[H]``, indices of the held sequences; None: all are held.

    Returns:
        float ``[T]``. As in :func:`masked_whiten`, a group of fewer than two masked tokens is
        centred and not scaled. Sums are taken in float64.
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
    scale_G = (squares_G / divisor_G + eps).rsqrt()
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
    """Flat index of each sequence's last masked token.

    Returns:
        int64 ``[B]``, -1 for a sequence without a masked token.
    """
    index_T = torch.where(mask_T > 0, torch.arange(len(mask_T), device=mask_T.device), -1)
    last_B = torch.segment_reduce(index_T.double(), "max", offsets=cu_seqlens, initial=-1.0)
    return last_B.long()


def place_at_last(x_B: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Place each sequence's value at its last masked token: ``[B] -> [T]``, 0 elsewhere.

    The value of a sequence without a masked token is dropped.
    """
    last_B = last_masked_index(mask_T, cu_seqlens)
    has_token_B = last_B >= 0
    placed_T = torch.zeros(len(mask_T), dtype=x_B.dtype, device=x_B.device)
    placed_T[last_B[has_token_B]] = x_B[has_token_B]
    return placed_T
