"""The kernel of ``torch.rms_norm`` on a GPU, with its allocations.

On CUDA ``torch.rms_norm`` runs ``_fused_rms_norm``, which keeps its input and one float32 number
per row for the backward pass (native_functions.yaml and derivatives.yaml of torch 2.13). A torch
without CUDA's kernels decomposes it, and keeps several float32 tensors of the input's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.recorder import RankRecorder


def install(counters: Counters, recorder: RankRecorder) -> None:
    """Replace ``torch.rms_norm`` for tensors on the simulated GPU.

    Args:
        counters: counters of the rank, for the two kernels.
        recorder: records their accesses.
    """
    plain = torch.rms_norm

    def kernel(read: Sequence[Tensor], written: Sequence[Tensor | None]) -> None:
        counters.operation()
        recorder.launch()
        recorder.touch(read, written)

    class FusedNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            rows = x.shape[: x.dim() - weight.dim()]
            rstd, out = x.new_empty((*rows, 1), dtype=torch.float32), torch.empty_like(x)
            kernel([x, weight], [rstd, out])
            ctx.save_for_backward(x, weight, rstd)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
            x, weight, rstd = ctx.saved_tensors
            grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            grad_x = torch.empty_like(x)
            kernel([grad, x, weight, rstd], [grad_x, grad_weight])
            return grad_x, grad_weight

    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if x.device.type != "cuda" or weight is None or weight.dtype != x.dtype:
            return plain(x, list(shape), weight, eps)
        if tuple(weight.shape) != tuple(x.shape[x.dim() - weight.dim() :]):
            raise RuntimeError(f"rms_norm of {tuple(x.shape)} with weights {tuple(weight.shape)}")
        return FusedNorm.apply(x, weight)

    torch.rms_norm = rms_norm
    torch.nn.functional.rms_norm = rms_norm
