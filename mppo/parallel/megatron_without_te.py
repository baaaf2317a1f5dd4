"""What Megatron-Core 0.16.1 uses but has only where Transformer Engine or Apex is installed."""

from __future__ import annotations

import importlib
import types

from torch import Tensor


def install() -> None:
    """Define the missing names, without which the router of every mixture of experts fails, and no
    MLA model can be built. Idempotent; changes nothing where Transformer Engine is installed.
    ``moe_utils.te_general_gemm`` becomes None, which the router's code treats as absent.
    ``TELinear`` and ``TEColumnParallelLinear`` of ``multi_latent_attention`` become classes without
    instances, because ``isinstance`` checks use them."""
    moe_utils = vars(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
    moe_utils.setdefault("te_general_gemm", None)
    attention = vars(importlib.import_module("megatron.core.transformer.multi_latent_attention"))
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(attention.get(name), type):
            attention[name] = type(name, (), {})


def fuse_weight_gradients() -> None:
    """Replace Apex's kernel that adds weight gradients to their float32 buffer. Idempotent.

    With ``gradient_accumulation_fusion``, Transformer Engine's layers do so themselves. With the
    same setting, Megatron refuses to build its own linear layers if Apex is missing. This includes
    the output layer, whose weight this package uses without calling the layer.
    """
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate)


def _accumulate(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Compute ``main_grad += grad_output.T @ inputs`` in float32, in place: ``[out, in]`` from the
    layer's input ``[tokens, in]`` and its output's gradient ``[tokens, out]``."""
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))
