"""Each rank holds some of a batch's sequences. These functions gather a few numbers per sequence.

Baselines, whitening, normalisers and metrics need them for all sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mppo.algos.masked import ALONE, Gather
from mppo.batch.batch import Sequences
from mppo.parallel.collectives import all_gather_varlen, group_size
from mppo.parallel.exchange import sum_over_ranks


def gather_of(batch: Sequences) -> Gather:
    """How this rank learns numbers of the sequences that others hold."""
    return _gather(batch, batch.held_H, batch.num_sequences)


def gather_of_mini_batch(
    batch: Sequences, indices: Sequence[int] | Tensor
) -> tuple[Gather, Tensor]:
    """``gather_of`` for the sequences of a mini-batch, in its order; and int64, the position in the
    mini-batch of each of its sequences held here."""
    position = (batch.places(indices) >= 0).nonzero()[:, 0]
    return _gather(batch, position, len(indices)), position


def _gather(batch: Sequences, position_H: Tensor, total: int) -> Gather:
    if batch.is_replicated or group_size() == 1:
        return ALONE

    def sequences(x_H: Tensor) -> Tensor:
        # each number has one holder, so the sum over ranks is exact
        x_B = torch.zeros(total, *x_H.shape[1:], dtype=torch.float64)
        x_B[position_H] = x_H.double()
        return sum_over_ranks(x_B).to(x_H.dtype)

    return Gather(sequences, lambda x: torch.cat(all_gather_varlen(x, group_size())))


def gather_table(gather: Gather, table: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors ``[H, ...]`` of the sequences held in one exchange: float64 ``[B, ...]``."""
    columns = [x_H.double().reshape(len(x_H), x_H.shape[1:].numel()) for x_H in table.values()]
    rows_B = gather.sequences(torch.cat(columns, 1))
    parts = rows_B.split([column.shape[1] for column in columns], dim=1)
    return {
        name: part.reshape(len(part), *x_H.shape[1:])
        for (name, x_H), part in zip(table.items(), parts, strict=True)
    }


def sequence_digests(batch: Sequences) -> Tensor:
    """A number for each sequence, equal for equal tokens: int64 ``[B]``. Collective, unless every
    rank holds all sequences."""
    if batch.digest_B is not None:
        return batch.digest_B
    digest_B = torch.zeros(batch.num_sequences, dtype=torch.int64)
    lengths = batch.cu_seqlens.diff().tolist()
    for number, tokens in zip(batch.held_H.tolist(), batch.tokens_T.split(lengths)):
        hashed = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()
        digest_B[number] = int.from_bytes(hashed, "little", signed=True)
    return digest_B if batch.is_replicated else sum_over_ranks(digest_B)
