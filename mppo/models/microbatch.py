"""A micro-batch: complete sequences selected from a batch and packed for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mppo.algos.token_axis import select_cu_seqlens, select_sequences, sequence_token_indices
from mppo.batch.batch import Sequences
from mppo.models.attention.context import ContextPlace, split_context
from mppo.models.attention.packed_sequences import Packing, pack_context, pack_sequences
from mppo.parallel.device import copied


@dataclass(frozen=True)
class MicroBatch:
    """Model input, and the mapping from the model's outputs to the batch.

    Shapes: ``t`` tokens in the model (padded to the layout's multiple; this rank's share under
    context parallelism), ``T`` tokens of the selected sequences, ``N`` response tokens among them
    that this rank predicts.

    Args:
        packing: layout of the sequences, with padding as a sequence of its own;
            ``logits_to_keep`` ``[N]`` is the token of the ``t`` that predicts each response token.
        target_N: int64, the response tokens.
        index_N: int64 (device), position of each response token in the ``T``.
        origin_t: int64 (CPU), ``packing.origin``.
        indices: the sequences, as indices into the batch.
    """

    tokens_t: Tensor
    packing: Packing
    target_N: Tensor
    index_N: Tensor
    host_index_N: Tensor
    origin_t: Tensor
    num_tokens: int
    indices: tuple[int, ...]

    def scatter(self, x_N: Tensor) -> Tensor:
        """Scatter response-token quantities ``[N, ...]`` to the token axis, 0 elsewhere."""
        x_T = x_N.new_zeros(self.num_tokens, *x_N.shape[1:])
        if len(self.index_N) == 0:
            return x_T + x_N.sum()
        return x_T.index_copy(0, self.index_N, x_N)

    def tokens_in(self, batch: Sequences) -> Tensor:
        """Indices of its tokens in the batch that it was cut from: int64 ``[T]`` (CPU)."""
        return sequence_token_indices(batch.cu_seqlens, batch.places(self.indices))

    def predicted_in(self, batch: Sequences) -> Tensor:
        """Indices of its response tokens in that batch: int64 ``[N]`` (CPU)."""
        return self.tokens_in(batch)[self.host_index_N]


def select_held(batch: Sequences, numbers: Sequence[int]) -> Sequences:
    """The batch with only some of its held sequences, by their ascending indices in the batch."""
    if batch.held_H.tolist() == list(numbers):
        return batch
    places = batch.places(numbers)
    tokens = sequence_token_indices(batch.cu_seqlens, places)
    per_token = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name.endswith("_T")}
    return replace(
        batch,
        held_H=batch.held_H[places],
        cu_seqlens=select_cu_seqlens(batch.cu_seqlens, places),
        **{name: tensor[tokens] for name, tensor in per_token.items()},
    )


def cut(
    batch: Sequences,
    indices: Sequence[int],
    multiple: int,
    mask_T: Tensor,
    context: ContextPlace | None = None,
    merge_rows: bool = True,
) -> MicroBatch:
    """Make a micro-batch of some sequences that a batch holds on the CPU, on this rank's device.

    Args:
        indices: the sequences; an empty list gives a dummy of one padding sequence and N = 0.
        multiple: the model's token count is a multiple of this (sequence parallelism).
        mask_T: float ``[T]`` of the batch, 1 on the tokens to predict.
        merge_rows: ``merge`` of ``split_context``.
    """
    chosen = batch.places(indices)
    lengths = batch.cu_seqlens.diff()[chosen]
    tokens_T = select_sequences(batch.tokens_T, batch.cu_seqlens, chosen)
    mask_T = select_sequences(mask_T, batch.cu_seqlens, chosen)
    if context is None:
        packing = _pack_sequences(lengths, multiple)
    else:
        split = split_context(lengths.tolist(), context, multiple, merge_rows)
        packing = pack_context(split)
    # from the T tokens to the model's t, where padding (origin -1) reads the appended token 0
    origin_t = packing.origin
    tokens_t = torch.cat([tokens_T, tokens_T.new_zeros(1)])[origin_t]
    # the inverse: index among the t of each of the T, -1 for tokens of other context-parallel ranks
    slot_T = torch.full((len(tokens_T) + 1,), -1)
    slot_T[origin_t] = torch.arange(len(origin_t))
    # token i is predicted by the output of token i - 1, so the rank that holds i - 1 computes it
    index_N = mask_T.nonzero()[:, 0]
    index_N = index_N[slot_T[index_N - 1] >= 0]
    packing.logits_to_keep = slot_T[index_N - 1]
    there = copied([tokens_t, tokens_T[index_N], index_N, *packing.tensors()])
    return MicroBatch(
        tokens_t=there[0],
        packing=packing.with_tensors(there[3:]),
        target_N=there[1],
        index_N=there[2],
        host_index_N=index_N,
        origin_t=origin_t,
        num_tokens=len(tokens_T),
        indices=tuple(indices),
    )


def padding_tokens(total: int, multiple: int) -> int:
    """Number of padding tokens after sequences of ``total`` tokens; at least one without any."""
    return -total % multiple if total else multiple


def _pack_sequences(lengths: Tensor, multiple: int) -> Packing:
    padding = padding_tokens(int(lengths.sum()), multiple)
    padded = [*lengths.tolist(), padding] if padding else lengths.tolist()
    return pack_sequences(torch.tensor([0, *padded]).cumsum(0), padding)
