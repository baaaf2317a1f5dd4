"""Matrix products of Megatron's linear layers on a CPU where oneDNN is faster than MKL.

MKL uses only AVX2 on processors not made by Intel; oneDNN uses AVX-512 wherever it exists. oneDNN
computes the layers' outputs and the gradients of their inputs in float32; weight gradients and the
vocabulary projection stay with MKL. oneDNN compiles a kernel for each new shape. All layers and
roles share the token count of a micro-batch, which pays for the compilation even if the count never
recurs; the token count of a single expert would not (``mppo.models.moe.experts`` has its own
products).
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mppo.cpu import onednn

_SMALLEST = 1 << 26
"""Multiply-adds from which a product is worth a compiled kernel."""


def is_faster() -> bool:
    """Whether MKL leaves this processor's AVX-512 unused."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    both = torch.backends.mkl.is_available() and onednn.is_available()
    if not both or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix``: ``[..., k]`` and ``[k, n]`` to ``[..., n]``."""
    large = matrix.dim() == 2 and x.numel() * matrix.shape[1] >= _SMALLEST
    if large and x.dtype is torch.float32 and x.is_contiguous():
        return onednn.linear(x, matrix.t())
    return x.matmul(matrix)


class _Products(TorchFunctionMode):
    """Redirects matrix products to :func:`product`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.matmul, Tensor.matmul) and not kwargs:
            return product(*args)
        return function(*args, **(kwargs or {}))


def with_products(layer: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Derive a linear layer's autograd function that multiplies by :func:`product`."""

    class Linear(layer):
        @staticmethod
        def forward(ctx, *args):
            with _Products():
                return layer.forward(ctx, *args)

        @staticmethod
        def backward(ctx, *args):
            with _Products():
                return layer.backward(ctx, *args)

    return Linear


@functools.cache
def install() -> None:
    """Replace Megatron's linear layers if oneDNN is faster. Idempotent."""
    from megatron.core.tensor_parallel import layers

    if is_faster():
        onednn.keep_few_kernels()
        for name in ("LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight"):
            setattr(layers, name, with_products(getattr(layers, name)))
