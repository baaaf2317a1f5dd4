"""Attention of the local engine's model: whole sequences, or one token per row over a cache.

Shapes: ``R`` rows, ``H`` heads, ``K`` heads of keys, ``T`` queries, ``C`` cache columns, ``D`` head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "mppo_rows"
_QUERY_BLOCK = 512
"""Queries that share a mask, or hold their scores at once."""
_GAP = -(2**30)
"""Position of a cache column that holds no token."""


@dataclass(frozen=True)
class Columns:
    """Cache columns that this step's tokens see in a layer.

    Args:
        first: all columns before it are hidden from all rows.
        mask: added to the scores, ``[R, 1, 1, C - first]``; None hides nothing more.
    """

    first: int
    mask: Tensor | None


class ColumnPositions:
    """Which cache columns the rows' tokens see, step by step.

    A row's prompt lies in the first columns, its response from column ``begin`` on; what is between
    them is hidden. A layer with a window sees the last positions only, whose columns differ by row
    until all of them are in the response.

    Args:
        length_R: int64, prompt lengths, none beyond ``begin``.
        begin: column of the first response token.
        columns: most columns there will be.
        window: tokens a token sees, itself included, in the layers with a window; None without.
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
        """Mask of layers without a window, where ``columns`` are filled: ``[R, 1, 1, columns]``."""
        return None if self._gap is None else self._gap[..., :columns]

    def window_seen(self, columns: int) -> Columns | None:
        """What the tokens in the last of ``columns`` see in layers with a window; None: the same
        as in layers without."""
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


def set_windows(model: nn.Module, windows: Sequence[int | None]) -> None:
    """Tell each layer's attention how far it sees, which :func:`row_attention` reads.

    Args:
        model: a causal LM of transformers.
        windows: by layer, tokens a query sees, itself included; None: all before it.
    """
    for layer, window in zip(model.get_decoder().layers, windows, strict=True):
        layer.self_attn.row_window = window


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
    """Causal attention over fresh keys (prefill), or of one token per row over the cache.

    An attention implementation of transformers, by the name ``ATTENTION``.

    Args:
        module: the layer's attention; see :func:`set_windows`.
        query: ``[R, H, T, D]``.
        key, value: ``[R, K, C, D]`` with their own widths; C equals T in prefill.
        attention_mask: in decoding, of layers without a window; see ``ColumnPositions.all_seen``.
        scaling: factor on scores; None: ``1 / sqrt(D)``.
        softcap: c in ``c * tanh(scores / c)``.
        window_columns: in decoding, of layers with a window; see ``ColumnPositions.window_seen``.

    Returns:
        ``[R, T, H, D]``, and None.
    """
    rows, heads, length, width = query.shape
    if length > 1:
        return _prefill(query, key, value, scaling, softcap, module.row_window), None
    if module.row_window is not None and window_columns is not None:
        first, attention_mask = window_columns.first, window_columns.mask
        key, value = key[:, :, first:], value[:, :, first:]
    # query heads that share a key head are folded into the query axis: keys are never repeated
    operands = [query.view(rows, key.shape[1], -1, width), key, value, attention_mask]
    if query.device.type == "cpu":  # several times faster than bfloat16 for one token
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
    """Causal attention of sequences with themselves: ``[R, T, H, D]``."""
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
    """Attention with an added mask; with a cap, which torch's function lacks, written out."""
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
