"""Core attention over packed sequences with torch's scaled_dot_product_attention, or flash-attn.

Without Transformer Engine Megatron's own core attention materialises the score matrix and supports
neither packed sequences nor MLA's value width. This module replaces it in the layer spec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from mppo.models.attention import flash
from mppo.models.attention.block import BlockAttention
from mppo.models.attention.context import ContextPlace, ContextRows, ContextSplit, sequence_order
from mppo.models.attention.packed_sequences import AttentionRows, Packing
from mppo.models.attention.ring import ring_attention
from mppo.parallel import device
from mppo.safety.input_error import InputError

_QUERY_BLOCK = 512
"""Queries per block of the CPU's causal attention; all blocks share one mask."""


class _Rearrange(torch.autograd.Function):
    """``x[index]`` for an ``index`` without repeats; index ``len(x)`` (if ``padded``) reads zeros.
    The backward pass is a gather too (by ``inverse``), not a scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        return _take(x, index) if padded else x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return _take(grad, inverse), None, None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, index)


class PackedAttention(torch.nn.Module):
    """Causal self-attention of each packed sequence with itself.

    It supports grouped-query heads, a value width other than the key's, a sliding window (the
    configuration's ``window_size`` in the layers of ``window_attn_skip_freq``) and soft-capped
    scores (``attn_logit_softcap``). For sequences split over context-parallel ranks,
    ``cp_comm_type`` ``p2p`` is ring attention; with ``all_gather``, keys and values are gathered
    over the group, and gathered again in the backward pass, so that no activation as long as the
    full sequence is kept. The constructor's arguments are those Megatron passes to a core
    attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type=None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.context_group = pg_collection.cp if pg_collection is not None else None
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.softcap: float | None = getattr(config, "attn_logit_softcap", None)
        # Megatron's function also takes None (a window in every layer), unlike its annotation
        frequency = cast("int | list[int]", config.window_attn_skip_freq)
        size = config.window_size
        windowed = is_layer_window_attention(size, frequency, layer_number)
        self.window = size[0] + 1 if size and windowed else None
        if cp_comm_type not in (None, "p2p", "all_gather"):
            raise InputError(
                f"cp_comm_type: {cp_comm_type} needs Transformer Engine, which is not installed; "
                "set p2p or all_gather"
            )
        self.ring = cp_comm_type == "p2p"
        self.block = BlockAttention(self.softmax_scale, self.window, self.softcap)
        self.flash = flash.Flash(
            self.softmax_scale, self.window, self.softcap, config.deterministic_mode
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """Attend within each sequence, from ``[T, 1, heads, dim]`` or ``[T, heads, dim]`` (keys and
        values with their own head count and width) to ``[T, 1, heads * value_dim]``."""
        packing = packed_seq_params
        assert packing is not None, "PackedAttention needs a Packing"
        q, k, v = (x.flatten(0, -3) if x.dim() == 4 else x for x in (query, key, value))
        if packing.context is not None:
            context = self._attend_split(q, k, v, packing.context)
            return context.reshape(context.shape[0], 1, -1)
        if flash.fits(q, v):
            context = self.flash.packed(q, k, v, packing.cu_seqlens_q, packing.max_seqlen_q)
            return context.reshape(context.shape[0], 1, -1)
        # padded rows per group of similar lengths, then back to the packed order
        out = [self._attend(rows, packing, q, k, v) for rows in packing.attention_rows]
        context = out[0] if len(out) == 1 else torch.cat(out)
        if not packing.contiguous:
            context = _Rearrange.apply(context, packing.scatter, packing.slots, False)
        return context.reshape(context.shape[0], 1, -1)

    def _attend(
        self, rows: AttentionRows, packing: Packing, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of one group of sequences: ``[rows * width, heads, value_dim]``."""
        if not packing.contiguous:
            index = rows.gather, rows.inverse, rows.padded
            q, k, v = (_Rearrange.apply(x, *index) for x in (q, k, v))
        q, k, v = (x.view(rows.rows, rows.width, *x.shape[1:]) for x in (q, k, v))
        return self._rows(q, k, v).flatten(0, 1)

    def _attend_split(self, q: Tensor, k: Tensor, v: Tensor, split: ContextSplit) -> Tensor:
        """Attention of local queries on the keys of all ranks: ``[t, heads, value_dim]``."""
        if self.ring:
            assert self.context_group is not None, "Megatron passes the groups"
            return ring_attention(q, k, v, split, self.block, self.context_group)

        def attend(q, k, v):
            shapes = k.shape[1:], v.shape[1:]
            # one collective for both: keys and values side by side
            both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
            both = gather_from_sequence_parallel_region(both, group=self.context_group)
            k, v = both.split([shape.numel() for shape in shapes], dim=1)
            k, v = (x.unflatten(1, shape) for x, shape in zip((k, v), shapes))
            return torch.cat(
                [self._attend_chunks(rows, split.place, q, k, v) for rows in split.rows]
            )

        if not torch.is_grad_enabled():
            return attend(q, k, v)
        # recomputed in the backward pass, so that the gathered keys and values are not kept
        return checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=False)

    def _attend_chunks(
        self, rows: ContextRows, place: ContextPlace, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of both local chunks of a group: ``[2 * rows * chunk, heads, value_dim]``."""
        k, v = (sequence_order(x, rows, place) for x in (k, v))
        out = []
        for part, chunk in enumerate(place.chunks):
            first, last = chunk * rows.chunk, (chunk + 1) * rows.chunk
            # no query of the chunk sees a key after the chunk or before its first one's window
            start = 0 if self.window is None else max(0, first - self.window + 1)
            attended = self._rows(rows.chunk_of(q, part), k[:, start:last], v[:, start:last])
            out.append(attended.flatten(0, 1))
        return torch.cat(out)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of rows whose last query is at the position of the last key, with at
        least as many keys as queries: ``[rows, queries, heads, value_dim]``."""
        if flash.fits(q, v):
            return self.flash.rows(q, k, v)
        queries, keys = q.shape[1], k.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = self.window if self.window is not None and self.window < keys else None
        plain = self.softcap is None and window is None
        if plain and keys != queries > _QUERY_BLOCK and not device.is_cuda():
            return self._query_blocks(q, k, v).transpose(1, 2)
        if self.softcap is not None:
            mask = window_mask(queries, keys, window or keys, q.device)
            out = softcapped_attention(q, k, v, mask, self.softmax_scale, self.softcap)
        else:
            mask = None
            if window is not None:
                mask = window_mask(queries, keys, window, q.device)
            elif queries != keys:
                mask = causal_lower_right(queries, keys)
            out = self._kernel(q, k)(q, k, v, mask, is_causal=mask is None)
        return out.transpose(1, 2)

    def _kernel(self, q: Tensor, k: Tensor) -> Callable[..., Tensor]:
        grouped = q.shape[1] != k.shape[1]
        attend = F.scaled_dot_product_attention
        return functools.partial(attend, scale=self.softmax_scale, enable_gqa=grouped)

    def _query_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of fewer queries than keys on the CPU:
        ``[rows, heads, queries, value_dim]``. The CPU's kernel needs a mask of queries times keys,
        where CUDA's needs none. Queries are therefore taken in blocks: their masks are slices of
        one, and a block reads no key that lies after its last query."""
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.full((_QUERY_BLOCK, keys), -torch.inf, dtype=q.dtype)
        mask.triu_(keys - _QUERY_BLOCK + 1)
        out = []
        for first in range(0, queries, _QUERY_BLOCK):
            block = q[:, :, first : first + _QUERY_BLOCK]
            seen = keys - queries + first + block.shape[2]
            bias = mask[-block.shape[2] :, keys - seen :]
            keys_seen = k[:, :, :seen], v[:, :, :seen]
            out.append(self._kernel(q, k)(block, *keys_seen, bias))
        return torch.cat(out, 2)


def window_mask(queries: int, keys: int, window: int, where: torch.device) -> Tensor:
    """bool ``[queries, keys]``: a query sees itself and the ``window - 1`` keys before it. The last
    query is at the position of the last key."""
    shift = keys - queries
    ones = torch.ones(queries, keys, dtype=torch.bool, device=where)
    return ones.tril(shift).triu(shift + 1 - window)


def softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float
) -> Tensor:
    """Compute attention ``[rows, heads, queries, dim]`` on ``softcap * tanh(scores / softcap)``
    from k and v ``[rows, groups, keys, dim]`` and a bool mask ``[queries, keys]``, True where a key
    is seen; materialises the score matrix. Source: Gemma 2 (https://arxiv.org/abs/2408.00118)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
