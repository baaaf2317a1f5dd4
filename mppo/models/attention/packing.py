"""How the sequences of a micro-batch lie in it, as the model needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mppo.models.attention.context import ContextSplit

_MAX_ATTENTION_PADDING = 1.25


@dataclass(frozen=True)
class AttentionRows:
    """Sequences of similar length, padded to one length for one attention call.

    Args:
        rows: number of sequences.
        width: padded length.
        gather: int64 ``[rows * width]``, position in the micro-batch of each slot; ``T`` for a
            padded slot (the caller appends one row of zeros).
    """

    rows: int
    width: int
    gather: Tensor


@dataclass
class Packing(PackedSeqParams):
    """Sequences laid end to end, with what the local attention precomputes from them.

    ``qkv_format`` is not "thd": queries stay ``[T, 1, heads, dim]`` and rotary angles come one per
    token, so Megatron applies them in one operation instead of once per sequence.

    Args:
        positions: int64 ``[T]``, position of each token in its sequence.
        attention_rows: groups that together cover every token once.
        scatter: int64 ``[T]``, slot of each token in the concatenated rows of all groups.
        contiguous: the one group lays its tokens in order, without padding.
        origin: int64 ``[T]``, which token of the micro-batch each one is; -1 for padding.
        context: the split over context-parallel ranks; ``attention_rows`` is then empty and all
            tensors above speak of local tokens, save ``cu_seqlens``.
        logits_to_keep: int64 ``[N]``, the tokens whose output the head uses; None: all.
        routing: a ``MicroRouting``, what the routers of a mixture of experts do with the
            micro-batch; None: choose.
    """

    positions: Tensor | None = None
    attention_rows: tuple[AttentionRows, ...] = ()
    scatter: Tensor | None = None
    contiguous: bool = False
    origin: Tensor | None = None
    context: ContextSplit | None = None
    logits_to_keep: Tensor | None = None
    routing: Any = None


def pack_context(split: ContextSplit, device: torch.device) -> Packing:
    """Plan this rank's part of a micro-batch."""
    cu_seqlens = split.cu_seqlens.to(device=device, dtype=torch.int32)
    longest = int(split.cu_seqlens.diff().max())
    return Packing(
        qkv_format="packed",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=split.positions_t.to(device),
        origin=split.origin_t.to(device),
        context=split,
    )


def pack_sequences(cu_seqlens: Tensor, device: torch.device, padding: int = 0) -> Packing:
    """Plan a micro-batch of whole sequences.

    Args:
        cu_seqlens: int64 ``[B + 1]`` on the CPU; the last entry is T.
        device: where the model runs.
        padding: tokens at the end that are none of the micro-batch's.

    Returns:
        Packing whose attention groups waste at most a quarter of their slots.
    """
    lengths = cu_seqlens.diff().tolist()
    starts = cu_seqlens.tolist()
    total = starts[-1]
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    groups = _group_by_length(lengths)
    rows = []
    scatter = torch.empty(total, dtype=torch.int64)
    slot = 0
    for members in groups:
        width = lengths[members[0]]
        offsets = torch.arange(width)
        first = torch.tensor([starts[b] for b in members])[:, None]
        length = torch.tensor([lengths[b] for b in members])[:, None]
        gather = torch.where(offsets < length, first + offsets, total).flatten()
        real = gather < total
        scatter[gather[real]] = slot + torch.nonzero(real).flatten()
        slot += len(gather)
        rows.append(AttentionRows(len(members), width, gather.to(device)))
    contiguous = len(rows) == 1 and bool((scatter == torch.arange(total)).all()) and slot == total
    cu_seqlens = cu_seqlens.to(device=device, dtype=torch.int32)
    origin = torch.arange(total)
    origin[total - padding :] = -1
    return Packing(
        qkv_format="packed",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        attention_rows=tuple(rows),
        scatter=scatter.to(device),
        contiguous=contiguous,
        origin=origin.to(device),
    )


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Sequences, longest first, cut where padding to the group's longest would waste too much."""
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
