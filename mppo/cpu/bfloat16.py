"""What is slow in bfloat16 on a CPU, by way of float32.

Without AVX512-BF16 or AMX, torch takes two and a half times (AVX-512) to over a hundred times
(AVX2) as long for products of bfloat16 matrices as of float32 ones; with AVX512-BF16 alone, the
gradient of its attention is still slower, most of all for short sequences. Here those operators
widen their operands to float32, compute, and round the result to bfloat16 once: the same rounding
as a bfloat16 unit that accumulates in float32. Other dtypes go to torch's own kernels unchanged.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from mppo.cpu import onednn

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_GRADIENT = f"{_ATTENTION}_backward"
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", _ATTENTION, _ATTENTION_GRADIENT)


def slow_operators() -> tuple[str, ...]:
    """The operators that this CPU computes faster in float32 than in bfloat16."""
    if not onednn.multiplies_bfloat16():
        return _OPERATORS
    units = torch.cpu.get_capabilities()
    only_avx512 = units.get("avx512_bf16") and not units.get("amx_bf16")
    return (_ATTENTION_GRADIENT,) if only_avx512 else ()


@functools.cache
def install() -> None:
    """Widen the operators that are slow in bfloat16. Idempotent, for the whole process."""
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
    """The registrations; they last as long as this object."""
    return torch.library.Library("aten", "IMPL")


def _original(name: str):
    """torch's own kernel of an operator."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def _widened_into():
    """``torch.mm(a, b, out=...)``."""
    multiply, into = _original("mm"), _original("mm.out")

    def operator(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
        if first.dtype is not torch.bfloat16:
            return into(first, second, out=out)
        return out.copy_(multiply(first.float(), second.float()))

    return operator


def _widened(name: str):
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
    """Attention's outputs in bfloat16; its log-sum-exp, second of the forward, stays float32."""
    forward = not name.endswith("backward")
    return tuple(x if forward and i == 1 else x.bfloat16() for i, x in enumerate(out))
