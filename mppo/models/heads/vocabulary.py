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

from mppo.algos.kl import full_kl_shard, full_kl_shard_grad

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


@dataclass(frozen=True)
class Projection:
    """A reference's vocabulary projection ``[V_p, hidden]``, frozen, split like the policy's."""

    weight: Tensor
    shard: VocabShard


class _ChunkedFullKL(torch.autograd.Function):
    """``sum_v p_v (log p_v - log q_v)``; the backward pass recomputes both logits."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        shard: VocabShard,
        reference: Projection,
    ) -> Tensor:
        kls, normalisers = [], []
        group = shard.group
        for h, r in zip(hidden.split(shard.chunk), ref_hidden.split(shard.chunk)):
            logits, _ = vocabulary_logits(h, weight, shard)
            ref_logits, _ = vocabulary_logits(r, reference.weight, reference.shard)
            both = log_sum_exp(logits, group), log_sum_exp(ref_logits, group)
            # rounding may leave a KL of equal distributions slightly below 0
            kls.append(all_reduce(full_kl_shard(logits, ref_logits, *both), group).clamp_(min=0.0))
            normalisers.append(torch.stack(both))
            del logits, ref_logits
        kl_N = torch.cat(kls)
        ctx.save_for_backward(hidden, weight, ref_hidden, torch.cat(normalisers, 1), kl_N)
        ctx.shard, ctx.reference = shard, reference
        return kl_N

    @staticmethod
    def backward(ctx, grad_kl: Tensor):
        hidden, weight, ref_hidden, normalisers, kl = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        reference: Projection = ctx.reference
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for first in range(0, len(hidden), shard.chunk):
            part = slice(first, first + shard.chunk)
            logits, slope = vocabulary_logits(hidden[part], weight, shard)
            ref_logits, _ = vocabulary_logits(ref_hidden[part], reference.weight, reference.shard)
            normaliser, ref_normaliser = normalisers[:, part]
            grad = full_kl_shard_grad(logits, ref_logits, normaliser, ref_normaliser, kl[part])
            grad *= grad_kl[part, None]
            grad_hidden[part] = backpropagate_logits(
                grad, slope, hidden[part], weight, shard, grad_weight
            )
            del logits, ref_logits, slope, grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def chunked_full_kl(
    hidden_N: Tensor,
    weight: Tensor,
    ref_hidden_N: Tensor,
    shard: VocabShard,
    reference: Projection,
) -> Tensor:
    """Compute KL(policy || reference) over the vocabulary at each position, float32 ``[N]`` (nats).

    Args:
        hidden_N: final hidden states ``[N, hidden]``, the same on every tensor-parallel rank. Their
            gradient is this rank's share; the caller sums it over the tensor-parallel group.
        weight: this rank's rows of the policy's projection ``[V_p, hidden]``.
        ref_hidden_N: the reference's hidden states at the same positions ``[N, ref_hidden]``.
    """
    if len(hidden_N) == 0:
        return hidden_N.sum(1).float() + 0.0 * weight.sum().float()
    return _ChunkedFullKL.apply(hidden_N, weight, ref_hidden_N, shard, reference)
