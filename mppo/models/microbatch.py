"""A micro-batch as the model takes it: whole sequences cut out of a batch, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.packing import select_sequences, sequence_token_indices
from mppo.batch import Batch
from mppo.models.attention.context import ContextPlace, split_context
from mppo.models.attention.packing import Packing, pack_context, pack_sequences


@dataclass(frozen=True)
class MicroBatch:
    """Model input and where its outputs belong.

    Shapes: ``t`` tokens in the model (padded to the layout's multiple; this rank's share under
    context parallelism), ``T`` tokens of the chosen sequences, ``N`` response tokens among them
    that are predicted here.

    Args:
        tokens_t: int64 ``[t]`` on the model's device.
        packing: where the sequences lie, padding as a sequence of its own, and which of the ``t``
            predict each of the response tokens (``logits_to_keep``, ``[N]``).
        target_N: int64 ``[N]``, the response tokens.
        index_N: int64 ``[N]`` (device), position of each in the ``T`` of this micro-batch.
        num_tokens: T.
        indices: the sequences, as indices of the batch.
    """

    tokens_t: Tensor
    packing: Packing
    target_N: Tensor
    index_N: Tensor
    num_tokens: int
    indices: tuple[int, ...]

    def scatter(self, x_N: Tensor) -> Tensor:
        """Response-token quantities on the micro-batch's token axis, zero elsewhere: ``[T]``."""
        x_T = torch.zeros(self.num_tokens, dtype=x_N.dtype, device=x_N.device)
        if len(self.index_N) == 0:
            return x_T + x_N.sum()
        return x_T.index_copy(0, self.index_N, x_N)

    def tokens_in(self, batch: Batch) -> Tensor:
        """Where its tokens lie in the batch it was cut from: int64 ``[T]`` (CPU)."""
        return sequence_token_indices(batch.cu_seqlens, self.indices)

    def predicted_in(self, batch: Batch) -> Tensor:
        """Where the response tokens predicted here lie in that batch: int64 ``[N]`` (CPU)."""
        return self.tokens_in(batch)[self.index_N.cpu()]


def cut(
    batch: Batch,
    indices: Sequence[int],
    multiple: int,
    device: torch.device,
    mask_T: Tensor,
    context: ContextPlace | None = None,
    merge_rows: bool = True,
) -> MicroBatch:
    """Cut sequences out of a batch.

    Args:
        batch: the batch, on the CPU.
        indices: which sequences; none gives a dummy of one padding sequence and N = 0.
        multiple: the model's token count is a multiple of this (sequence parallelism).
        device: the model's device.
        mask_T: float ``[T]`` of the batch, 1 on the tokens to predict.
        context: this rank's place, where sequences are split over context-parallel ranks.
        merge_rows: see ``split_context``.

    Returns:
        The micro-batch.
    """
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    lengths = batch.lengths_B[chosen]
    tokens_T = select_sequences(batch.tokens_T, batch.cu_seqlens, chosen)
    mask_T = select_sequences(mask_T, batch.cu_seqlens, chosen)
    if context is None:
        packing = _pack_sequences(lengths, multiple, device)
    else:
        split = split_context(lengths.tolist(), context, multiple, merge_rows)
        packing = pack_context(split, device)
    origin_t = packing.origin.cpu()
    tokens_t = torch.cat([tokens_T, tokens_T.new_zeros(1)])[origin_t]
    slot_T = torch.full((len(tokens_T) + 1,), -1)
    slot_T[origin_t] = torch.arange(len(origin_t))
    index_N = mask_T.nonzero()[:, 0]
    index_N = index_N[slot_T[index_N - 1] >= 0]
    packing.logits_to_keep = slot_T[index_N - 1].to(device)
    return MicroBatch(
        tokens_t=tokens_t.to(device),
        packing=packing,
        target_N=tokens_T[index_N].to(device),
        index_N=index_N.to(device),
        num_tokens=len(tokens_T),
        indices=tuple(indices),
    )


def _pack_sequences(lengths: Tensor, multiple: int, device: torch.device) -> Packing:
    """The packing of whole sequences, with padding as a sequence of its own."""
    total = int(lengths.sum())
    padding = -total % multiple if total else multiple
    padded = [*lengths.tolist(), padding] if padding else lengths.tolist()
    return pack_sequences(torch.tensor([0, *padded]).cumsum(0), device, padding)
