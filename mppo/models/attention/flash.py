"""The flash-attn package's kernels, on a GPU, for ``mppo.models.attention.core.PackedAttention``.

They take packed sequences without padding, and support sliding windows and soft-capped scores.
https://github.com/Dao-AILab/flash-attention, version 2.6 or newer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

_WIDEST = 256
"""Largest head dimension of the kernels."""


@dataclass(frozen=True)
class Flash:
    """flash-attn's causal attention; the options are those of ``BlockAttention``, and
    ``deterministic`` makes the backward pass sum in a fixed order."""

    scale: float | None
    window: int | None
    softcap: float | None
    deterministic: bool

    def packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Causal attention of each packed sequence with itself: ``[T, heads, dim]`` from bfloat16
        or float16 queries of that shape, k and v ``[T, groups, dim]`` and int32
        ``cu_seqlens [B + 1]``."""
        from flash_attn import (  # pyright: ignore[reportMissingImports]  # optional, GPU only
            flash_attn_varlen_func,
        )

        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        return flash_attn_varlen_func(q, k, v, *bounds, **self._options())

    def rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of rows whose last query is at the position of the last key: q
        ``[rows, queries, heads, dim]``, bfloat16 or float16; k, v ``[rows, keys, groups, dim]``."""
        from flash_attn import (  # pyright: ignore[reportMissingImports]  # optional, GPU only
            flash_attn_func,
        )

        return flash_attn_func(q, k, v, **self._options())

    def _options(self) -> dict[str, object]:
        return {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1 if self.window is None else self.window - 1, 0),
            "softcap": self.softcap or 0.0,
            "deterministic": self.deterministic,
        }


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether flash-attn is installed and has a kernel for these queries and values. It has none
    where their widths differ, as in MLA."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1] <= _WIDEST
        and is_installed()
    )


@functools.cache
def is_installed() -> bool:
    """Whether flash-attn 2.6 or newer is installed; flash-attn-4 has another interface."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in found.split(".")[:2]) >= (2, 6)
