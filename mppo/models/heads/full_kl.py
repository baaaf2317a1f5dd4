"""Full-vocabulary KL between a policy and a frozen reference, without holding [T, V].

Shapes: N positions that predict a response token, V_p rows of both projections on this
tensor-parallel rank. The two models share a vocabulary; their hidden sizes may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.kl import full_kl_shard, full_kl_shard_grad
from mppo.models.heads.vocabulary import (
    VocabShard,
    all_reduce,
    backpropagate_logits,
    log_sum_exp,
    vocabulary_logits,
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
