"""All experts of a layer in one autograd function over tokens that are sorted by expert.

Megatron's ``SequentialMLP`` runs each expert as a separate module: with many small experts the
splitting, joining and autograd bookkeeping cost as much as the matrix products. Here the products
write into one buffer, and the activation between them runs once for all tokens. Parameters and
results are those of ``SequentialMLP``. Where Transformer Engine is installed, its grouped GEMM is
used instead.

Shapes: ``n`` tokens sorted by expert, ``E`` local experts, ``h`` hidden, ``f`` an expert's width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SortedExperts(SequentialMLP):
    """``SequentialMLP`` as one autograd function, if the experts are plain gated SiLU networks."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor):
        """Return outputs ``[n, h]`` of tokens ``[n, h]``, weighted by ``probs [n]``, and no bias;
        int64 ``tokens_per_expert [E]`` sums to n."""
        if self.num_local_experts == 1 or not is_plain(self.config):
            return super().forward(tokens, tokens_per_expert, probs)
        experts = cast("list[MLP]", list(self.local_experts))
        first = [expert.linear_fc1.weight for expert in experts]
        second = [expert.linear_fc2.weight for expert in experts]
        counts = tokens_per_expert.tolist()
        return _GatedExperts.apply(tokens, probs, counts, *first, *second), None


def is_plain(config: TransformerConfig) -> bool:
    """Whether the experts compute ``(silu(gate) * up * probs) @ W2`` and nothing else. Fused
    activation and in-place weight gradients change no result and may be set."""
    extras = (
        config.add_bias_linear, config.moe_apply_probs_on_input, config.fp8, config.fp4,
        config.use_te_activation_func, config.activation_func_clamp_value,
        config.glu_linear_offset, config.delay_wgrad_compute,
    )  # fmt: skip
    silu = config.activation_func is F.silu
    return silu and config.gated_linear_unit and not any(extras)


class _GatedExperts(torch.autograd.Function):
    """Gated feed-forward networks over sorted tokens. The tokens, the outputs of the first product
    and the weights are saved; the backward pass recomputes the activation."""

    @staticmethod
    def forward(ctx, tokens: Tensor, probs: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        first, second = weights[: len(counts)], weights[len(counts) :]
        inner = _multiply(tokens, counts, [weight.t() for weight in first])
        weighted = (_gated_silu(inner) * probs[:, None]).to(tokens.dtype)
        ctx.save_for_backward(tokens, probs, inner, *weights)
        ctx.counts = counts
        return _multiply(weighted, counts, [weight.t() for weight in second])

    @staticmethod
    def backward(ctx, grad: Tensor):
        tokens, probs, inner, *weights = ctx.saved_tensors
        counts = ctx.counts
        first, second = weights[: len(counts)], weights[len(counts) :]
        grad = grad.contiguous()
        activated = _gated_silu(inner)
        weighted = (activated * probs[:, None]).to(tokens.dtype)
        grads_second = _outer(grad, weighted, counts, ctx.needs_input_grad[3 + len(counts) :])
        grad_weighted = _multiply(grad, counts, second)
        grad_probs = (grad_weighted * activated).sum(1).to(probs.dtype)
        grad_activated = (grad_weighted * probs[:, None]).to(inner.dtype)
        grad_inner = _gated_silu_gradient(inner, grad_activated)
        grads_first = _outer(grad_inner, tokens, counts, ctx.needs_input_grad[3 : 3 + len(counts)])
        grad_tokens = _multiply(grad_inner, counts, first)
        return grad_tokens, grad_probs, None, *grads_first, *grads_second


def _gated_silu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[n, 2 f]`` to ``[n, f]``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gated_silu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``x`` ``[n, 2 f]`` from the output's ``[n, f]``; allocates only the result."""
    gate, up = x.chunk(2, -1)
    out = torch.empty_like(x)
    grad_gate, grad_up = out.chunk(2, -1)
    torch.ops.aten.silu(gate, out=grad_up).mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward(grad_gate, gate, grad_input=grad_gate)
    return out


def _multiply(x: Tensor, counts: list[int], weights: Sequence[Tensor]) -> Tensor:
    """``x[rows of e] @ weights[e]`` for every expert e, ``[n, width]``."""
    out = x.new_empty(len(x), weights[0].shape[1])
    parts = zip(x.split(counts), out.split(counts), weights, strict=True)
    for rows, into, weight in parts:
        if len(rows):
            torch.mm(rows, weight, out=into)
    return out


def _outer(
    left: Tensor, right: Tensor, counts: list[int], needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """``left^T @ right`` of every expert's rows; zeros for an expert without tokens, None where
    ``needs_grad`` is False."""
    edges = itertools.pairwise([0, *itertools.accumulate(counts)])
    return [
        left[begin:end].t() @ right[begin:end] if needed else None
        for (begin, end), needed in zip(edges, needs_grad, strict=True)
    ]
