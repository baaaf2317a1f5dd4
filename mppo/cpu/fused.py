"""CPU versions of CUDA's fused kernels: rotary embedding, SwiGLU, weight gradients.

Megatron's unfused versions read and write the activations two to three times as often. In float32
the results are bitwise equal to those of the unfused operations.
"""

from __future__ import annotations

import functools
import types

import torch
from torch import Tensor

from mppo.cpu import onednn
from mppo.cpu.gated_silu import gated_silu, gated_silu_gradient


class _Rotary(torch.autograd.Function):
    """``x * cos + rotate_half(x) * sin``; the gradient has the same form."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin.roll(sin.shape[-1] // 2, -1)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x``; the first half of ``sin`` is negated, which gives ``rotate_half``'s signs."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def with_fused_rotary(unfused):
    """Fuse Megatron's ``_apply_rotary_pos_emb_bshd`` for heads rotated by halves.

    Args:
        unfused: Megatron's function; the other cases (interleaved, MLA) still call it.
    """

    @functools.wraps(unfused)
    def apply(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        if rotary_interleaved or multi_latent_attention:
            return unfused(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
        angles, width = _cos_sin(freqs, mscale, t.dtype), freqs.shape[-1]
        if width == t.shape[-1]:
            return _Rotary.apply(t, *angles)
        return torch.cat([_Rotary.apply(t[..., :width], *angles), t[..., width:]], -1)

    return apply


def _cos_sin(freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines in ``dtype``, cached on ``freqs``, which all layers share."""
    key = (mscale, dtype)
    kept = getattr(freqs, "cos_sin", None)
    if kept is None or kept[0] != key:
        cos, sin = ((f(freqs) * mscale).to(dtype) for f in (torch.cos, torch.sin))
        sin[..., : sin.shape[-1] // 2].neg_()
        kept = vars(freqs)["cos_sin"] = (key, (cos, sin))
    return kept[1]


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of ``x = [gate, up]``, times an optional weight per token."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        out = gated_silu(x)
        return out if weights is None else (out * weights).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weights = ctx.saved_tensors
        grad_weights = None
        if weights is not None:
            grad_weights = (grad * gated_silu(x)).sum(-1, keepdim=True).to(weights.dtype)
            grad = (grad * weights).to(x.dtype)
        return gated_silu_gradient(x, grad), grad_weights


def swiglu(x: Tensor, bias: Tensor | None, *unused) -> Tensor:
    """Megatron's ``bias_swiglu_impl``: ``[..., 2 f]`` to ``[..., f]``."""
    return _SwiGLU.apply(x if bias is None else x + bias, None)


def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *unused) -> Tensor:
    """Megatron's ``weighted_bias_swiglu_impl``: ``weights`` is ``[..., 1]``."""
    return _SwiGLU.apply(x if bias is None else x + bias, weights)


def accumulate_weight_gradient(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Compute ``main_grad += grad_output.T @ inputs``.

    torch's CPU product of bfloat16 matrices rounds its result to bfloat16. It is used nonetheless
    where the processor has bfloat16 instructions, as float32 would take twice as long there.

    Args:
        inputs: ``[tokens, in]``.
        grad_output: ``[tokens, out]``.
        main_grad: float32 ``[out, in]``.
    """
    if grad_output.dtype is torch.bfloat16 and onednn.multiplies_bfloat16():
        main_grad.add_(grad_output.t() @ inputs)
        return
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))


@functools.cache
def install() -> None:
    """Replace Megatron's functions by those of this module. Idempotent."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import shared_experts

    rope_utils._apply_rotary_pos_emb_bshd = with_fused_rotary(rope_utils._apply_rotary_pos_emb_bshd)
    mlp.bias_swiglu_impl = shared_experts.bias_swiglu_impl = swiglu
    mlp.weighted_bias_swiglu_impl = weighted_swiglu
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_weight_gradient
    )
