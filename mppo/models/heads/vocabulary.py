"""From hidden states to log-probabilities, entropies and values, without ever holding [T, V].

Shapes: N positions that predict a response token, V_p rows of the vocabulary projection on this
tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

_LOG_ZERO = -1e4
"""Replaces log 0 in products with a probability of 0, where -inf would give nan."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's share of the vocabulary projection, and the transforms of its logits.

    Args:
        start: first vocabulary row of this rank.
        size: vocabulary size without padding; padded rows have probability 0.
        group: tensor-parallel group; None without tensor parallelism.
        temperature: log-probabilities are of softmax(logits / temperature).
        softcap: c in ``c * tanh(logits / c)``; None: no soft-cap.
        chunk: number of positions whose logits are in memory at a time.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None
    temperature: float
    softcap: float | None
    chunk: int


def vocabulary_logits(
    hidden: Tensor, weight: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor | None]:
    """Compute logits after soft-cap and temperature from hidden ``[n, hidden]``.

    Returns:
        float32 logits ``[n, V_p]``, -inf in padded rows; the soft-cap's derivative ``[n, V_p]``, or
        None without soft-cap.
    """
    logits = (hidden @ weight.t()).float()
    slope = None
    if shard.softcap is not None:
        bounded = torch.tanh(logits / shard.softcap)
        slope = 1 - bounded.square()
        logits = shard.softcap * bounded
    if shard.temperature != 1.0:
        logits /= shard.temperature
    padded_from = shard.size - shard.start
    if padded_from < logits.shape[1]:
        logits[:, max(padded_from, 0) :] = -torch.inf
    return logits, slope


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, op=dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` in place over the ranks that share the vocabulary (None: this rank only)."""
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def log_sum_exp(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Log-sum-exp over the full vocabulary, from every rank's ``[n, V_p]``: ``[n]``."""
    largest = all_reduce(logits.amax(1), group, dist.ReduceOp.MAX)
    return largest + all_reduce((logits - largest[:, None]).exp().sum(1), group).log()


@torch.no_grad()
def chunked_squares(hidden_N: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """``sum_v p_v^2`` at each position, float32 ``[N]``, without a gradient."""
    found = [hidden_N.new_zeros(0, dtype=torch.float32)]
    for hidden in hidden_N.split(shard.chunk):
        logits, _ = vocabulary_logits(hidden, weight, shard)
        logits -= log_sum_exp(logits, shard.group)[:, None]
        found.append(all_reduce(logits.mul_(2.0).exp_().sum(1), shard.group))
    return torch.cat(found)


def backpropagate_logits(
    grad: Tensor,
    slope: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    grad_weight: Tensor,
) -> Tensor:
    """Backpropagate through :func:`vocabulary_logits`. Returns this rank's share of the gradient of
    ``hidden``, ``[n, hidden]`` in the weight's dtype, and adds to ``grad_weight``, float32
    ``[V_p, hidden]``. ``grad`` is the float32 gradient of the logits ``[n, V_p]`` and is
    overwritten; ``slope`` is the soft-cap's derivative."""
    if shard.temperature != 1.0:
        grad /= shard.temperature
    if slope is not None:
        grad *= slope
    grad = grad.to(weight.dtype)
    grad_weight += grad.t() @ hidden
    return grad @ weight


def _local_target(target: Tensor, shard: VocabShard, rows: int) -> tuple[Tensor, Tensor]:
    """Column of the target in this rank's logits, and whether this rank has it (0 if not)."""
    column = target - shard.start
    here = (column >= 0) & (column < rows)
    return torch.where(here, column, 0), here


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy and the normaliser's logarithm: each ``[n]``."""
    logits = vocabulary_logits(hidden, weight, shard)[0]
    largest = all_reduce(logits.amax(1), shard.group, dist.ReduceOp.MAX)
    column, here = _local_target(target, shard, weight.shape[0])
    chosen = logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0.0)
    # in place where possible: only exp is a second [n, V_p] tensor
    exp = logits.sub_(largest[:, None]).exp()
    # H = log Z - sum_v p_v z_v with shifted logits z; three sums in one all-reduce
    parts = [exp.sum(1), logits.clamp_min_(_LOG_ZERO).mul_(exp).sum(1), chosen]
    total, weighted, chosen = all_reduce(torch.stack(parts), shard.group)
    log_sum = total.log()
    return chosen - largest - log_sum, log_sum - weighted / total, largest + log_sum


def _chunk_gradient(
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits ``[n, V_p]``, without the targets' own term; overwrites the logits."""
    logits.sub_(normaliser[:, None])
    if grad_entropy is None:
        return logits.exp_().mul_(-grad_logprobs[:, None])
    probs = logits.exp()
    # dH/dz_j = -p_j (log p_j + H)
    surprise = logits.clamp_min_(_LOG_ZERO)
    surprise.add_(entropy[:, None]).mul_(grad_entropy[:, None])
    return probs.mul_(surprise.add_(grad_logprobs[:, None]).neg_())


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(target) and entropy from hidden states; the backward pass recomputes the logits. A
    function per chunk frees its logits before the next chunk's are allocated."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(shard.chunk), target.split(shard.chunk))
        parts = [_chunk_logprobs(h, weight, t, shard) for h, t in chunks]
        logprobs_N, entropy_N, normaliser_N = (torch.cat(x) for x in zip(*parts))
        ctx.save_for_backward(hidden, weight, target, normaliser_N, entropy_N)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, target, normaliser, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for first in range(0, len(hidden), shard.chunk):
            part = slice(first, first + shard.chunk)
            logits, slope = vocabulary_logits(hidden[part], weight, shard)
            upstream = grad_logprobs[part], None if grad_entropy is None else grad_entropy[part]
            grad = _chunk_gradient(logits, normaliser[part], entropy[part], *upstream)
            column, here = _local_target(target[part], shard, weight.shape[0])
            # d log p(target) / d logits has 1 in the target's column
            onehot = torch.where(here, grad_logprobs[part], 0.0)
            grad.scatter_add_(1, column[:, None], onehot[:, None])
            grad_hidden[part] = backpropagate_logits(
                grad, slope, hidden[part], weight, shard, grad_weight
            )
            del logits, slope, grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def chunked_logprobs(
    hidden_N: Tensor, weight: Tensor, target_N: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Compute log-probability of the target and entropy at each position, float32 ``[N]`` in nats.

    Args:
        hidden_N: final hidden states ``[N, hidden]``, the same on every tensor-parallel rank. Their
            gradient is this rank's share; the caller sums it over the tensor-parallel group.
        weight: this rank's rows of the projection ``[V_p, hidden]``.
        target_N: int64 token ids.
    """
    if len(hidden_N) == 0:
        nothing = hidden_N.sum(1).float() + 0.0 * weight.sum().float()
        return nothing, nothing
    return _ChunkedLogprobs.apply(hidden_N, weight, target_N, shard)


def gather_hidden(hidden: Tensor, sequence_parallel: bool) -> Tensor:
    """Gather the last stage's output over the tensor-parallel ranks: ``[T, hidden]``. The backward
    pass sums the ranks' shares of the gradient."""
    if sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0]


def gather_values(values: Tensor, sequence_parallel: bool) -> Tensor:
    """Gather the value head's ``[t, bins]`` over the tensor-parallel ranks: ``[T, bins]``."""
    if not sequence_parallel:
        return values
    return tensor_parallel.gather_from_sequence_parallel_region(
        values, tensor_parallel_output_grad=False
    )
