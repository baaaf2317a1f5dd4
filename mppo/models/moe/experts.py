"""The experts of a layer in one step over tokens that are sorted by expert.

Megatron's ``SequentialMLP`` runs each expert as a module of its own: with many small experts the
splitting, joining and book-keeping cost as much as the matrix products. Here the products write
into one buffer, and what stands between them is done once for all tokens. Same parameters, same
numbers; grouped GEMM of Transformer Engine takes its place where that is installed.

Shapes: ``n`` tokens sorted by expert, ``E`` local experts, ``h`` hidden, ``f`` an expert's width.
"""

from __future__ import annotations

import itertools

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.cpu.gated_silu import gated_silu, gated_silu_gradient


class SortedExperts(SequentialMLP):
    """``SequentialMLP`` in one step, where the experts are plain gated SiLU networks."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor):
        """Outputs ``[n, h]``, weighted by ``probs`` ``[n]``, and no bias."""
        if self.num_local_experts == 1 or not is_plain(self.config):
            return super().forward(tokens, tokens_per_expert, probs)
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        counts = tokens_per_expert.tolist()
        return _GatedExperts.apply(tokens, probs, counts, *first, *second), None


def is_plain(config: TransformerConfig) -> bool:
    """Whether the experts compute ``(silu(gate) * up * probs) @ W2`` and nothing else.

    Fusing the activation and adding weight gradients in place change no number, so they may be on:
    both are done here anyway, or by Megatron's DDP.
    """
    extras = (
        config.add_bias_linear, config.moe_apply_probs_on_input, config.fp8, config.fp4,
        config.use_te_activation_func, config.activation_func_clamp_value,
        config.glu_linear_offset, config.delay_wgrad_compute,
    )  # fmt: skip
    silu = config.activation_func is torch.nn.functional.silu
    return silu and config.gated_linear_unit and not any(extras)


class _GatedExperts(torch.autograd.Function):
    """Gated feed-forward networks over sorted tokens.

    Kept for the backward pass: the tokens, the first products and the weights; the activation is
    computed again.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, probs: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        first, second = weights[: len(counts)], weights[len(counts) :]
        inner = _multiply(tokens, counts, [weight.t() for weight in first])
        weighted = (gated_silu(inner) * probs[:, None]).to(tokens.dtype)
        ctx.save_for_backward(tokens, probs, inner, *weights)
        ctx.counts = counts
        return _multiply(weighted, counts, [weight.t() for weight in second])

    @staticmethod
    def backward(ctx, grad: Tensor):
        tokens, probs, inner, *weights = ctx.saved_tensors
        counts = ctx.counts
        first, second = weights[: len(counts)], weights[len(counts) :]
        grad = grad.contiguous()
        activated = gated_silu(inner)
        weighted = (activated * probs[:, None]).to(tokens.dtype)
        grads_second = _outer(grad, weighted, counts, ctx.needs_input_grad[3 + len(counts) :])
        grad_weighted = _multiply(grad, counts, second)
        grad_probs = (grad_weighted * activated).sum(1).to(probs.dtype)
        grad_activated = (grad_weighted * probs[:, None]).to(inner.dtype)
        grad_inner = gated_silu_gradient(inner, grad_activated)
        grads_first = _outer(grad_inner, tokens, counts, ctx.needs_input_grad[3 : 3 + len(counts)])
        grad_tokens = _multiply(grad_inner, counts, first)
        return grad_tokens, grad_probs, None, *grads_first, *grads_second


def _multiply(x: Tensor, counts: list[int], weights) -> Tensor:
    """``x @ weights[e]`` for every expert's rows, ``[n, width]``."""
    out = x.new_empty(len(x), weights[0].shape[1])
    parts = zip(x.split(counts), out.split(counts), weights, strict=True)
    for rows, into, weight in parts:
        if len(rows):
            torch.mm(rows, weight, out=into)
    return out


def _outer(left: Tensor, right: Tensor, counts: list[int], wanted) -> list[Tensor | None]:
    """``left^T @ right`` of every expert's rows; zeros for an expert without any."""
    edges = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [
        left[begin:end].t() @ right[begin:end] if needed else None
        for (begin, end), needed in zip(edges, wanted, strict=True)
    ]
