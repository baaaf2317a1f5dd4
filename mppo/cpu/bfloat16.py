"""Operators that are slow in bfloat16 on a CPU, computed in float32.

Without AVX512-BF16 or AMX, torch's products of bfloat16 matrices take from two and a half times
(AVX-512) to over a hundred times (AVX2) as long as those of float32 matrices; with AVX512-BF16
alone, the gradient of attention is still slower, especially for short sequences. These operators
convert their operands to float32, compute, and round the result to bfloat16 once, as a bfloat16
unit that accumulates in float32 does. For other dtypes they call torch's own kernels.
"""

from __future__ import annotations

import functools
import os
import re
import warnings

import torch
from torch import Tensor

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_GRADIENT = f"{_ATTENTION}_backward"
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", _ATTENTION, _ATTENTION_GRADIENT)

_WITHOUT_BFLOAT16 = re.compile(r"SSE41|AVX|AVX2(_VNNI(_2)?)?|AVX512_CORE(_VNNI)?", re.IGNORECASE)
"""Values of ``ONEDNN_MAX_CPU_ISA`` that disable the bfloat16 instructions."""


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 instructions here; without them it is several times slower."""
    units = torch.cpu.get_capabilities()
    has_units = any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # last: Arm
    limited = _WITHOUT_BFLOAT16.fullmatch(os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return torch.backends.mkldnn.is_available() and has_units and not limited


def slow_operators() -> tuple[str, ...]:
    """Names of the operators that this CPU computes faster in float32 than in bfloat16."""
    if not multiplies_bfloat16():
        return _OPERATORS
    units = torch.cpu.get_capabilities()
    only_avx512 = units.get("avx512_bf16") and not units.get("amx_bf16")
    return (_ATTENTION_GRADIENT,) if only_avx512 else ()


@functools.cache
def install() -> None:
    """Replace the operators that are slow in bfloat16, for the process. Idempotent."""
    if not hasattr(torch.library, "get_kernel"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in slow_operators():
            _library().impl(name, _widened(name), "CPU", allow_override=True)
        if "mm" in slow_operators():
            _library().impl("mm.out", _widened_into(), "CPU", allow_override=True)


@functools.cache
def _library() -> torch.library.Library:
    """The registrations, which last as long as this object."""
    return torch.library.Library("aten", "IMPL")


def _original(name: str):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def _widened_into():
    """The replacement of ``torch.mm(a, b, out=...)``."""
    multiply, into = _original("mm"), _original("mm.out")

    def operator(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
        if first.dtype is not torch.bfloat16:
            return into(first, second, out=out)
        return out.copy_(multiply(first.float(), second.float()))

    return operator


def _widened(name: str):
    """The replacement of an operator whose first argument is a tensor."""
    original = _original(name)

    def operator(first: Tensor, *args, **kwargs):
        if first.dtype is not torch.bfloat16:
            return original(first, *args, **kwargs)
        args = [_wide(x) for x in (first, *args)]
        out = original(*args, **{k: _wide(v) for k, v in kwargs.items()})
        return out.bfloat16() if isinstance(out, Tensor) else _narrow(name, out)

    return operator


def _wide(x):
    return x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x


def _narrow(name: str, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert attention's outputs, except the log-sum-exp (second output of the forward pass)."""
    forward = not name.endswith("backward")
    return tuple(x if forward and i == 1 else x.bfloat16() for i, x in enumerate(out))
