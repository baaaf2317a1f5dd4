"""oneDNN's matrix product, by the operators that torch has for Inductor."""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

_KERNELS = 256
"""Compiled kernels that each of two caches keeps, instead of 1,024: one takes up to some MB."""

_WITHOUT_BFLOAT16 = re.compile(r"SSE41|AVX|AVX2(_VNNI(_2)?)?|AVX512_CORE(_VNNI)?", re.IGNORECASE)
"""Values of ``ONEDNN_MAX_CPU_ISA`` that disable the bfloat16 instructions."""


def is_available() -> bool:
    """Whether this build of torch has oneDNN, which is for the CPU only."""
    return torch.backends.mkldnn.is_available()


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 instructions here; without them it is several times slower."""
    units = torch.cpu.get_capabilities()
    has_units = any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # last: Arm
    limited = _WITHOUT_BFLOAT16.fullmatch(os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return is_available() and has_units and not limited


def keep_few_kernels() -> None:
    """Bound the memory of compiled kernels in this process; call it before the first product.

    Values in the user's environment take precedence. ``os.environ`` is not changed, so a server
    that is started with a copy of it keeps oneDNN's default.
    """
    for names in (
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"),
        ("LRU_CACHE_CAPACITY",),  # torch's own
    ):
        if not any(name in os.environ for name in names):
            os.putenv(names[0], str(_KERNELS))


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """``weight`` ``[out, in]`` in oneDNN's fastest layout for products with ``rows`` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``: ``[..., in]`` to ``[..., out]``; without gradient.

    oneDNN compiles a kernel for every new number of rows.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, contiguous or transposed, or packed by :func:`pack_weight`.
        bias: ``[out]``.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
