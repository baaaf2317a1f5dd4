"""Fused weight gradients of Megatron's own linear layers, for machines without Apex.

With ``gradient_accumulation_fusion``, Transformer Engine's layers add weight gradients to the
float32 buffer in one kernel. With the same setting, Megatron refuses to build its own linear layers
if Apex is missing. This includes the output layer, whose weight this package uses without calling
the layer.
"""

from __future__ import annotations

import types

from torch import Tensor


def accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Compute ``main_grad += grad_output.T @ inputs`` in float32, in place: ``[out, in]`` from the
    layer's input ``[tokens, in]`` and its output's gradient ``[tokens, out]``."""
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


def install() -> None:
    """Replace Apex's kernel by ``accumulate``. Idempotent."""
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
