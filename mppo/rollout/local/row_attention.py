"""Attention of the local engine's model: full sequences, or one token per row over a cache.

Shapes: ``R`` rows, ``H`` heads, ``K`` heads of keys, ``T`` queries, ``C`` cache columns, ``D`` head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from mppo.weights.names import hf_names

ATTENTION = "mppo_rows"
_QUERY_BLOCK = 512
"""Queries per block: bounds the memory of masks and scores."""
_GAP = -(2**30)
"""Position of a cache column that holds no token."""


@dataclass(frozen=True)
class Columns:
    """Cache columns that are visible to this step's tokens in a layer.

    Args:
        first: first column that is visible to any row.
        mask: added to the scores, ``[R, 1, 1, C - first]``; None: all columns from ``first`` on.
    """

    first: int
    mask: Tensor | None


class ColumnPositions:
    """The cache columns that are visible to each row's token, step by step.

    A row's prompt is in the first columns, its response from column ``begin`` on; the columns
    between them are hidden. In a layer with a sliding window only the last positions are visible;
    their columns differ by row until all of them are in the response.

    Args:
        length_R: int64 ``[R]``, prompt lengths, at most ``begin``.
        begin: column of the first response token.
        columns: largest number of columns.
        window: tokens visible to a token, itself included, in layers with a sliding window; None:
            no layer has one.
        dtype: of the masks.
    """

    def __init__(
        self, length_R: Tensor, begin: int, columns: int, window: int | None, dtype: torch.dtype
    ) -> None:
        self._begin, self._window, self._dtype = begin, window, dtype
        self._length_R, self._shortest = length_R.int(), int(length_R.min())
        self._position_RC: Tensor | None = None
        self._gap: Tensor | None = None
        if self._shortest == begin:
            return
        length_R1 = self._length_R[:, None]
        column_C = torch.arange(columns, dtype=torch.int32, device=length_R.device)
        in_prompt = column_C < length_R1
        position_RC = torch.where(in_prompt, column_C, column_C - (begin - length_R1))
        position_RC[~in_prompt & (column_C < begin)] = _GAP
        self._gap = self._hiding(position_RC < 0)
        if window is not None and window < columns:
            self._position_RC = position_RC

    def keep(self, rows: Tensor) -> None:
        """Drop every row whose index is not in ``rows``."""
        self._length_R = self._length_R[rows]
        self._position_RC = None if self._position_RC is None else self._position_RC[rows]
        self._gap = None if self._gap is None else self._gap[rows]

    def all_seen(self, columns: int) -> Tensor | None:
        """Mask of layers without a window, ``[R, 1, 1, columns]``; None: all are visible."""
        return None if self._gap is None else self._gap[..., :columns]

    def window_seen(self, columns: int) -> Columns | None:
        """Visible columns in layers with a window, for the tokens in the last of ``columns``.

        None: the same as in layers without a window.
        """
        if self._window is None or columns <= self._window:
            return None
        first = columns - self._window
        if self._position_RC is None or first >= self._begin:
            return Columns(first, None)
        first = max(0, first - (self._begin - self._shortest))
        oldest_R = self._length_R + columns - self._begin - self._window
        hidden = self._position_RC[:, first:columns] < oldest_R[:, None]
        return Columns(first, self._hiding(hidden))

    def _hiding(self, hidden_RC: Tensor) -> Tensor:
        mask = torch.zeros(hidden_RC.shape, dtype=self._dtype, device=hidden_RC.device)
        return mask.masked_fill_(hidden_RC, float("-inf"))[:, None, None]


def set_windows(model: PreTrainedModel, windows: Sequence[int | None]) -> None:
    """Set the sliding window of each layer's attention, for :func:`row_attention`.

    Args:
        model: a causal LM of transformers.
        windows: by layer, tokens visible to a query, itself included; None: all before it.
    """
    layers = cast("list[Any]", model.get_decoder().layers)
    attention, _, _ = hf_names(model.config.model_type).qkv[0].partition(".")
    for layer, window in zip(layers, windows, strict=True):
        getattr(layer, attention).row_window = window


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    window_columns: Columns | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention over new keys (prefill), or of one token per row over the cache.

    Registered in transformers as the attention implementation ``ATTENTION``.

    Args:
        module: the layer's attention; see :func:`set_windows`.
        query: ``[R, H, T, D]``.
        key, value: ``[R, K, C, D]``, of possibly different widths D; C equals T in prefill.
        attention_mask: in decoding, of layers without a window; see ``ColumnPositions.all_seen``.
        scaling: factor on scores; None: ``1 / sqrt(D)``.
        softcap: c in ``c * tanh(scores / c)``.
        window_columns: in decoding, of layers with a window; see ``ColumnPositions.window_seen``.

    Returns:
        ``[R, T, H, D]``, and None.
    """
    rows, heads, length, width = query.shape
    window = cast("int | None", module.row_window)
    if length > 1:
        return _prefill(query, key, value, scaling, softcap, window), None
    if window is not None and window_columns is not None:
        first, attention_mask = window_columns.first, window_columns.mask
        key, value = key[:, :, first:], value[:, :, first:]
    # query heads that share a key head are folded into the query axis, so keys are not repeated
    operands = [query.view(rows, key.shape[1], -1, width), key, value, attention_mask]
    if query.device.type == "cpu":  # for one token, float32 is several times faster than bfloat16
        operands = [x if x is None else x.float() for x in operands]
    out = _attend(*operands, scaling, softcap)
    return out.to(query.dtype).reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, row_attention)


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Causal self-attention of full sequences: ``[R, T, H, D]``."""
    length, shared = query.shape[2], key.shape[1] != query.shape[1]
    if softcap is None and (window is None or length <= window):
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
        return out.transpose(1, 2)
    if shared:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    place_T = torch.arange(length, device=query.device)
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        first = 0 if window is None else max(0, begin - window + 1)
        before = place_T[begin:end, None] - place_T[first:end]
        hidden = before < 0
        if window is not None:
            hidden |= before >= window
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(hidden, float("-inf"))
        part = (query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end])
        blocks.append(_attend(*part, mask, scaling, softcap))
    return torch.cat(blocks, 2).transpose(1, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Attention with an added mask; written out if scores are soft-capped, which torch lacks."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
