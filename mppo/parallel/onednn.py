"""oneDNN's matrix product as torch has it for Inductor; nothing else calls these operators."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_KERNELS = "64"
"""Compiled kernels that are kept; one takes 1 to 3 MB, and oneDNN and torch keep 1,024 each."""


def is_available() -> bool:
    """Whether this build of torch has oneDNN. It is for the CPU only."""
    return torch.backends.mkldnn.is_available()


def keep_few_kernels() -> None:
    """Bound the memory of compiled kernels in this process; call it before the first product.

    Numbers that the user's environment holds stay. ``os.environ`` is left alone: servers started
    from here keep oneDNN's own.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        if name not in os.environ:
            os.putenv(name, _KERNELS)


def pack(weight: Tensor, rows: int) -> Tensor:
    """``weight`` ``[out, in]`` as oneDNN reads it fastest for products of so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., in]`` to ``[..., out]``; knows no gradient.

    A kernel is compiled for every new number of rows (1 to 15 ms).

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]`` in any order of its two axes, or packed by :func:`pack`.
        bias: ``[out]``.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
