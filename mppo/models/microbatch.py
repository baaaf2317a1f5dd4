"""A micro-batch as the model takes it: whole sequences cut out of a batch, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.packing import select_sequences
from mppo.batch import Batch
from mppo.models.packing import Packing, pack


@dataclass(frozen=True)
class MicroBatch:
    """Model input and where its outputs belong.

    Shapes: ``t`` tokens in the model (padded to the layout's multiple), ``T`` tokens of the chosen
    sequences, ``N`` response tokens among them.

    Args:
        tokens_t: int64 ``[t]`` on the model's device.
        packing: where the sequences lie, padding as a sequence of its own.
        source_N: int64 ``[N]``, position whose hidden state predicts each response token.
        target_N: int64 ``[N]``, the response tokens.
        index_N: int64 ``[N]`` (device), position of each in the ``T`` of this micro-batch.
        num_tokens: T.
        indices: the sequences, as indices of the batch.
    """

    tokens_t: Tensor
    packing: Packing
    source_N: Tensor
    target_N: Tensor
    index_N: Tensor
    num_tokens: int
    indices: tuple[int, ...]


def cut(batch: Batch, indices: Sequence[int], multiple: int, device: torch.device) -> MicroBatch:
    """Cut sequences out of a batch.

    Args:
        batch: the batch, on the CPU.
        indices: which sequences; none gives a dummy of one padding sequence and N = 0.
        multiple: the model's token count is a multiple of this (sequence parallelism).
        device: the model's device.

    Returns:
        The micro-batch.
    """
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    lengths = batch.lengths_B[chosen]
    cu_seqlens = torch.zeros(len(chosen) + 1, dtype=torch.int64)
    cu_seqlens[1:] = lengths.cumsum(0)
    tokens_T = select_sequences(batch.tokens_T, batch.cu_seqlens, chosen)
    mask_T = select_sequences(batch.response_mask_T, batch.cu_seqlens, chosen)
    num_tokens = len(tokens_T)
    padding = -num_tokens % multiple if num_tokens else multiple
    tokens_t = torch.cat([tokens_T, tokens_T.new_zeros(padding)])
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([num_tokens + padding])])
    index_N = mask_T.nonzero()[:, 0]
    return MicroBatch(
        tokens_t=tokens_t.to(device),
        packing=pack(cu_seqlens, device),
        source_N=(index_N - 1).to(device),
        target_N=tokens_T[index_N].to(device),
        index_N=index_N.to(device),
        num_tokens=num_tokens,
        indices=tuple(indices),
    )
