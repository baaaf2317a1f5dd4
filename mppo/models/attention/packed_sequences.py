"""The layout of a micro-batch's sequences on the token axis, as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mppo.models.attention.context import ContextSplit
from mppo.parallel.device import copied


@dataclass
class MicroRouting:
    """Routing of one micro-batch, carried by its packing.

    Shapes: ``L`` MoE layers of this rank, ``t`` local tokens, ``E`` experts, ``k`` per token.

    Args:
        training: whether the pass belongs to forward_backward.
        chosen: int64 ``[L, t, k]``, experts to replay; -1 leaves the choice to the router.
        record: ``[L, t, k]``, filled with the experts taken.
        mini_batch_tokens, mini_batch_sequences: of the mini-batch, over all ranks.
        load: float32 ``[L, E]``, each expert's share of the mini-batch's choices; None where no
            loss needs it.
        sequence_t: int64 ``[t]``, index of each token's sequence; None where no loss needs it.
        num_sequences: sequences of this micro-batch.
    """

    training: bool
    chosen: Tensor | None = None
    record: Tensor | None = None
    mini_batch_tokens: int = 1
    mini_batch_sequences: int = 1
    load: Tensor | None = None
    sequence_t: Tensor | None = None
    num_sequences: int = 0


_TENSORS = ("cu_seqlens_q", "positions", "origin", "scatter", "slots", "logits_to_keep")
"""Fields of ``Packing`` that go to the device, besides those of its rows."""
_MAX_ATTENTION_PADDING = 1.25
"""Slots of a group of rows over its tokens, at most."""


@dataclass(frozen=True)
class AttentionRows:
    """Sequences of similar length, padded to one length for one attention call.

    Args:
        gather: int64 ``[rows * width]``, the token of the micro-batch in each slot; ``T`` for a
            padded slot (the caller appends one row of zeros).
        inverse: int64 ``[T]``, the slot of each token; ``rows * width`` for tokens of other groups.
    """

    rows: int
    width: int
    gather: Tensor
    inverse: Tensor
    padded: bool


@dataclass(kw_only=True)
class Packing(PackedSeqParams):
    """Sequences laid end to end, with the index tensors that local attention needs.

    It is made on the CPU; the model reads its copy on the device.

    ``qkv_format`` is not "thd": queries stay ``[T, 1, heads, dim]`` and rotary angles come one per
    token, so that Megatron applies them in one operation instead of once per sequence.

    Args:
        positions: int64 ``[T]``, position of each token in its sequence.
        origin: int64 ``[T]``, index of each token in the micro-batch; -1 for padding.
        attention_rows: groups that together cover every token once.
        scatter: int64 ``[T]``, slot of each token in the concatenated rows of all groups; None
            under context parallelism.
        slots: its inverse, the concatenated ``gather`` of all groups; None as ``scatter``.
        contiguous: whether there is one group, with its tokens in order and without padding.
        context: the split over context-parallel ranks; ``attention_rows`` is then empty and all
            tensors except ``cu_seqlens`` refer to local tokens.
        logits_to_keep: int64 ``[N]``, the tokens whose output the head uses; None: all.
    """

    positions: Tensor
    origin: Tensor
    attention_rows: tuple[AttentionRows, ...] = ()
    scatter: Tensor | None = None
    slots: Tensor | None = None
    contiguous: bool = False
    context: ContextSplit | None = None
    logits_to_keep: Tensor | None = None
    routing: MicroRouting | None = None

    def tensors(self) -> list[Tensor]:
        found = [getattr(self, name) for name in _TENSORS]
        found += [x for rows in self.attention_rows for x in (rows.gather, rows.inverse)]
        return [x for x in found if x is not None]

    def on_device(self) -> Packing:
        return self.with_tensors(copied(self.tensors()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Packing:
        rest = iter(tensors)
        own: dict[str, Any] = {
            name: next(rest) for name in _TENSORS if getattr(self, name) is not None
        }
        rows = tuple(
            replace(rows, gather=next(rest), inverse=next(rest)) for rows in self.attention_rows
        )
        return replace(self, **own, cu_seqlens_kv=own["cu_seqlens_q"], attention_rows=rows)


def pack_context(split: ContextSplit) -> Packing:
    cu_seqlens = split.cu_seqlens.int()
    longest = int(split.cu_seqlens.diff().max())
    return Packing(
        qkv_format="packed",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=split.positions_t,
        origin=split.origin_t,
        context=split,
    )


def pack_sequences(cu_seqlens: Tensor, padding: int = 0) -> Packing:
    """Pack a micro-batch of complete sequences, int64 ``cu_seqlens`` ``[B + 1]`` on the CPU, with
    ``padding`` tokens at the end as a sequence of their own. Attention groups have at most a
    quarter more slots than tokens."""
    lengths = cu_seqlens.diff().tolist()
    starts = cu_seqlens.tolist()
    total = starts[-1]
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    # attention runs on rectangles of equal rows; similar lengths share one, to bound the padding
    groups = _group_by_length(lengths)
    rows = []
    scatter = torch.empty(total, dtype=torch.int64)
    slot = 0
    for members in groups:
        width = lengths[members[0]]  # the longest comes first
        offsets = torch.arange(width)
        first = torch.tensor([starts[b] for b in members])[:, None]
        length = torch.tensor([lengths[b] for b in members])[:, None]
        # a slot beyond its sequence reads row T, which the caller appends as zeros
        gather = torch.where(offsets < length, first + offsets, total).flatten()
        # the inverse: where the output of each token comes from
        real = gather < total
        inverse = torch.full((total,), len(gather))
        inverse[gather[real]] = torch.nonzero(real).flatten()
        scatter = torch.where(inverse < len(gather), slot + inverse, scatter)
        slot += len(gather)
        padded = not bool(real.all())
        rows.append(AttentionRows(len(members), width, gather, inverse, padded))
    # one group in the original order: attention needs no rearrangement at all
    contiguous = len(rows) == 1 and bool((scatter == torch.arange(total)).all()) and slot == total
    cu_seqlens = cu_seqlens.int()
    origin = torch.arange(total)
    origin[total - padding :] = -1
    return Packing(
        qkv_format="packed",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions,
        attention_rows=tuple(rows),
        scatter=scatter,
        slots=torch.cat([group.gather for group in rows]),
        contiguous=contiguous,
        origin=origin,
    )


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of non-empty sequences, longest first, in groups that bound the padding. A group pads
    every sequence to its longest. A sequence opens a new group where the padded size would exceed
    ``_MAX_ATTENTION_PADDING`` times the group's tokens."""
    order = sorted((b for b in range(len(lengths)) if lengths[b]), key=lambda b: -lengths[b])
    groups: list[list[int]] = []
    tokens = 0
    for b in order:
        if groups:
            width = lengths[groups[-1][0]]
            if width * (len(groups[-1]) + 1) <= _MAX_ATTENTION_PADDING * (tokens + lengths[b]):
                groups[-1].append(b)
                tokens += lengths[b]
                continue
        groups.append([b])
        tokens = lengths[b]
    return groups
