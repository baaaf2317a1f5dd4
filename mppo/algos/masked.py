"""Sums, means and whitening over the masked tokens of a flat axis.

Shapes: ``T`` tokens of all sequences, concatenated, ``B`` sequences, ``cu_seqlens`` ``[B + 1]``.
Every function returns finite numbers for an empty mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mppo.algos.unique import unique_index

_PIECE = 1 << 18
"""Tokens per piece: a piece fits a core's cache. Sums over pieces are taken in float64."""


def masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum of ``x`` where ``mask`` is 1; values outside the mask, even NaN, are ignored."""
    return torch.where(mask_T > 0, x_T * mask_T, 0.0).sum()


def masked_mean(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """``sum(x m) / sum(m)``, and 0 where no token is masked in."""
    return masked_sum(x_T, mask_T) / mask_T.sum().clamp(min=1.0)


def masked_var(x_T: Tensor, mask_T: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the masked tokens: ``sum(m (x - mean)^2) / (n - 1)``, or ``/ n`` if biased.

    Args:
        x_T: float ``[T]``.
        mask_T: float ``[T]``, 0 or 1.
        unbiased: divide by ``n - 1`` (Bessel).

    Returns:
        Scalar; 0 for fewer than two tokens.
    """
    centered_T = torch.where(mask_T > 0, x_T - masked_mean(x_T, mask_T), 0.0)
    divisor = mask_T.sum() - (1.0 if unbiased else 0.0)
    return (centered_T.square() * mask_T).sum() / divisor.clamp(min=1.0)


def masked_whiten(
    x_T: Tensor,
    mask_T: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    out: Tensor | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the masked tokens, 0 outside the mask.

    Args:
        x_T: float ``[T]``, finite also outside the mask.
        mask_T: float ``[T]``, 0 or 1.
        shift_mean: False adds the mean back (rewards are scaled, not centred).
        unbiased: Bessel's correction (verl, TRL); OpenRLHF has none.
        eps: keeps the result finite for a constant input.
        out: result tensor; may be ``x_T`` itself, which saves an allocation.

    Returns:
        float ``[T]``. With fewer than two masked tokens the variance is undefined: the tokens are
        centred (so they become 0) and not scaled.

    Source: verl ``masked_whiten``; TRL ``masked_whiten``; the moments of pieces are merged by
    Chan's parallel update.
    """
    mask_T = mask_T.to(x_T.dtype)
    whitened_T = torch.empty_like(x_T) if out is None else out
    cuts = (torch.split(tensor, _PIECE) for tensor in (x_T, mask_T, whitened_T))
    pieces = list(zip(*cuts, strict=True))
    # one buffer for all pieces, so that the loop allocates nothing and stays in the cache
    scratch = x_T.new_empty(min(len(x_T), _PIECE))
    # count, mean and sum of squared deviations of the pieces so far
    count = mean = squares = 0.0
    for x, mask, _ in pieces:
        here = float(mask.sum())
        if count == 0:
            mean = float(torch.dot(x, mask)) / max(here, 1.0)
        # deviations from the mean so far: squares of the raw numbers would cancel in float32
        centered = torch.sub(x, mean, out=scratch[: len(x)]).mul_(mask)
        total = float(centered.sum())
        shift, both = total / max(here, 1.0), max(count + here, 1.0)
        # the piece's squares about its own mean, then the part between the two means (Chan)
        squares += float(torch.dot(centered, centered)) - shift * total
        squares += shift**2 * count * here / both
        mean += total / both
        count += here
    var = squares / max(count - (1.0 if unbiased else 0.0), 1.0)
    scale = 1.0 / math.sqrt(var + eps) if count >= 2 else 1.0
    zero = x_T.new_zeros(())
    # elementwise, so out may be x_T itself
    for x, mask, whitened in pieces:
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
) -> Tensor:
    """``(x - mean_g) / sqrt(var_g + eps)`` over each group's masked tokens, 0 outside the mask.

    Args:
        x_T: float ``[T]``, finite also outside the mask.
        mask_T: float ``[T]``, 0 or 1.
        cu_seqlens: int64 ``[B + 1]``.
        group_B: int64 ``[B]``; sequences with equal numbers form a group (one prompt).
        unbiased: Bessel's correction.
        eps: keeps the result finite, and 0, for a group of equal values.

    Returns:
        float ``[T]``. As in :func:`masked_whiten`, a group of fewer than two masked tokens is
        centred and not scaled. Sums are taken in float64.
    """
    labels, index_B, _ = unique_index(group_B)
    index_T, inside_T = expand_to_tokens(index_B, cu_seqlens), mask_T.double()

    def over_group(y_T: Tensor) -> Tensor:
        return y_T.new_zeros(len(labels)).index_add(0, index_T, y_T)

    count_G = over_group(inside_T)
    mean_G = over_group(x_T * inside_T) / count_G.clamp(min=1.0)
    centered_T = (x_T - mean_G[index_T]) * inside_T
    divisor_G = (count_G - (1.0 if unbiased else 0.0)).clamp(min=1.0)
    scale_G = (over_group(centered_T.square()) / divisor_G + eps).rsqrt()
    scale_G = torch.where(count_G >= 2, scale_G, 1.0)
    return (centered_T * scale_G[index_T]).to(x_T.dtype)


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
