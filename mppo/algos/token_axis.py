"""Selecting sequences from a flat token axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_token_indices(cu_seqlens: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    """Flat indices, int64 ``[T']``, of the tokens of the selected sequences, in the order of
    ``indices``; repeats are allowed."""
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=cu_seqlens.device)
    lengths = cu_seqlens.diff()[chosen]
    new_starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(cu_seqlens[:-1][chosen] - new_starts, lengths)
    return torch.arange(len(shift), device=cu_seqlens.device) + shift


def cumulative(lengths_B: Tensor) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths: int64 ``[B + 1]``."""
    cu_seqlens = torch.zeros(len(lengths_B) + 1, dtype=torch.int64, device=lengths_B.device)
    cu_seqlens[1:] = lengths_B.cumsum(0)
    return cu_seqlens


def select_cu_seqlens(cu_seqlens: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    """``cu_seqlens`` of the selected sequences: int64 ``[len(indices) + 1]``."""
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=cu_seqlens.device)
    return cumulative(cu_seqlens.diff()[chosen])


def select_sequences(x_T: Tensor, cu_seqlens: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    """Tokens of the selected sequences, end to end in the order of ``indices``; repeats count."""
    bounds = cu_seqlens.cpu().numpy()
    chosen = torch.as_tensor(indices, dtype=torch.int64).cpu().numpy()
    # copies of whole sequences take a fraction of the time of an index for every token
    return torch.cat([x_T[:0], *(x_T[bounds[i] : bounds[i + 1]] for i in chosen)])
