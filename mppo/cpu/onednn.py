"""oneDNN's matrix product as torch has it for Inductor; nothing else calls these operators."""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

_KERNELS = 256
"""Compiled kernels that are kept, instead of 1,024 twice: each takes up to some MB."""

_WITHOUT_BFLOAT16 = re.compile(r"SSE41|AVX|AVX2(_VNNI(_2)?)?|AVX512_CORE(_VNNI)?", re.IGNORECASE)
"""Limits by ``ONEDNN_MAX_CPU_ISA`` that leave no instruction to multiply bfloat16."""


def is_available() -> bool:
    """Whether this build of torch has oneDNN. It is for the CPU only."""
    return torch.backends.mkldnn.is_available()


def multiplies_bfloat16() -> bool:
    """Whether it multiplies bfloat16 by the processor's instructions, not several times slower."""
    units = torch.cpu.get_capabilities()
    has_units = any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # last: Arm
    limited = _WITHOUT_BFLOAT16.fullmatch(os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return is_available() and has_units and not limited


def keep_few_kernels() -> None:
    """Bound the memory of compiled kernels in this process; call it before the first product.

    Numbers in the user's environment stay. ``os.environ`` is left alone: a server that is started
    with a copy of it keeps oneDNN's own.
    """
    for names in (
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"),
        ("LRU_CACHE_CAPACITY",),  # torch's own
    ):
        if not any(name in os.environ for name in names):
            os.putenv(names[0], str(_KERNELS))


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """``weight`` ``[out, in]`` as oneDNN reads it fastest for products of so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., in]`` to ``[..., out]``; knows no gradient.

    A kernel is compiled for every new number of rows.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]`` in any order of its two axes, or packed by :func:`pack`.
        bias: ``[out]``.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
