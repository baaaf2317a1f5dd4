"""The attention kernel that torch selects on an H100, with its allocations.

``scaled_dot_product_attention`` selects a kernel by properties of a real device. This module
follows sdp_utils.cpp of torch 2.13 for compute capability 8.0 and newer: flash attention for half
precision, equal head widths of query and value up to 256 and no arbitrary mask; otherwise the
memory-efficient kernel.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""Number of calls by kernel."""


class LowerRight:
    """Stand-in for torch's ``causal_lower_right`` mask, which fails in a dispatch mode."""

    def __init__(self, queries: int, keys: int) -> None:
        self.shape = queries, keys


def install(core: Any) -> None:
    """Replace torch's selection of a kernel.

    Args:
        core: ``mppo.models.attention.core``, which imports the causal mask by name.
    """
    core.causal_lower_right = LowerRight
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                         enable_gqa=enable_gqa)  # fmt: skip
        if isinstance(attn_mask, LowerRight):
            attn_mask, is_causal = None, True
        half = query.dtype in (torch.float16, torch.bfloat16)
        width = query.shape[-1]
        if half and attn_mask is None and width == value.shape[-1] <= 256 and width % 8 == 0:
            calls["flash"] += 1
            return torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)

    torch.nn.functional.scaled_dot_product_attention = attention


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    calls["memory-efficient"] += 1
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    bias = None
    if mask is not None:
        bias = mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout, is_causal, scale=scale
    )[0]
