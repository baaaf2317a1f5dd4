"""Weight gradients of Megatron's own linear layers where only Transformer Engine's kernel exists.

With ``gradient_accumulation_fusion``, Transformer Engine's layers add weight gradients to the
float32 buffer in one kernel. The same setting makes Megatron refuse its own linear layers without
Apex, even the output layer, whose weight this package uses without calling the layer.
"""

from __future__ import annotations

import types

from torch import Tensor


def accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Compute ``main_grad += grad_output.T @ inputs`` in float32.

    Args:
        inputs: ``[tokens, in]``.
        grad_output: ``[tokens, out]``.
        main_grad: float32 ``[out, in]``.
    """
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


def install() -> None:
    """Put ``accumulate`` in the place of Apex's kernel. Idempotent."""
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
