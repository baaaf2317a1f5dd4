"""Megatron's top-k router with recorded or replayed choices and exact auxiliary losses.

A router reads the padding, the experts to replay and the losses' normalisers of a micro-batch from
its packing and the ``MicroRouting`` there. They are thus the right ones in pipelines, and in
recomputation, which runs a layer's forward pass a second time.

Shapes: ``t`` local tokens, ``n`` of them on this rank under sequence parallelism, ``L`` MoE layers
of this rank, ``E`` experts, ``k`` chosen per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mppo.models.attention.packed_sequences import MicroRouting, Packing
from mppo.parallel.layout import Layout


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Coefficients of the losses on the router's scores, 0 without: balance of the load over the
    mini-batch, the same within each sequence, and the mean squared log-sum-exp of the logits."""

    balance: float = 0.0
    sequence_balance: float = 0.0
    z: float = 0.0

    @property
    def on(self) -> bool:
        return bool(self.balance or self.sequence_balance or self.z)


class _Attach(torch.autograd.Function):
    """Return ``output``; the backward pass also sends gradient 1 to ``loss``."""

    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad.new_ones(())


class Router(TopKRouter):
    """Megatron's router with replay, recording and exact auxiliary losses; a hook of the layer sets
    ``packing`` before each forward pass.

    ``load`` are its counters since they were last reset, float64 ``[E + 4]``: tokens per expert;
    routed tokens; replayed choices that the router itself would not have made; replayed choices;
    sum of the auxiliary losses.
    """

    # Megatron annotates these as optional; the last two are None without an expert bias
    num_experts: int
    local_tokens_per_expert: Tensor
    expert_bias: Tensor
    packing: Packing

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.row = 0
        self.losses = AuxiliaryLoss()
        self.load: Tensor | None = None
        self._taken: Tensor | None = None
        # Megatron calls get_replay_topk of this object, which must not be a submodule
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)

    def prepare(self, row: int, losses: AuxiliaryLoss) -> Tensor:
        """Connect the router, ``row`` among this rank's MoE layers, to its role."""
        self.row = row
        self.losses = losses
        self.load = self.weight.new_zeros(self.num_experts + 4, dtype=torch.float64)
        return self.load

    def _local(self, x_t: Tensor, n: int) -> Tensor:
        """This tensor-parallel rank's ``n`` rows of ``x_t``, whose first axis is the tokens."""
        if len(x_t) == n:
            return x_t
        first = self.tp_group.rank() * n
        return x_t[first : first + n]

    def _choose(self, scores, topk, num_groups, group_topk, choose):
        """Replace Megatron's top-k: scores and indices ``[n, k]`` of the experts taken."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routing = self.packing.routing
        if routing is None:
            return values, own
        taken = own
        if routing.chosen is not None:
            replayed = self._local(routing.chosen[self.row], len(own))
            known = replayed[:, :1] >= 0
            taken = torch.where(known, replayed, own)
            values = scores.gather(1, taken)
            if (load := self._counters(routing)) is not None:
                same = (taken[:, :, None] == own[:, None, :]).any(2)
                load[-3] += (~same & known).sum()
                load[-2] += known.sum() * topk
        if routing.record is not None:
            self._local(routing.record[self.row], len(own)).copy_(taken)
        self._taken = taken
        return values, taken

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None):
        """Weights and choices ``[n, E]``; the weights carry the auxiliary losses' gradients."""
        probs, routing_map = super().routing(logits)
        routing = self.packing.routing
        if routing is None:
            return probs, routing_map
        logits = logits.view(-1, self.num_experts)
        real_n = self._local(self.packing.origin, len(logits)) >= 0
        load = self._counters(routing)
        if load is not None:
            load[: self.num_experts] += (routing_map & real_n[:, None]).sum(0)
            load[-4] += real_n.sum()
        if load is not None and routing.training and self.losses.on:
            loss = self._loss(logits, real_n, routing)
            load[-1] += loss.detach()
            probs = _Attach.apply(probs, loss)
        return probs, routing_map

    def _counters(self, routing: MicroRouting) -> Tensor | None:
        """The counters, in one forward pass per micro-batch; None in the others. With recomputation
        a training pass runs forward twice: first without gradient, not counted."""
        return self.load if routing.training == torch.is_grad_enabled() else None

    def _loss(self, logits: Tensor, real_n: Tensor, routing: MicroRouting) -> Tensor:
        """This rank's share of the mini-batch's auxiliary losses; the loss is their sum."""
        losses, real = self.losses, real_n[:, None]
        logits = logits.float()
        total = logits.new_zeros(())
        if losses.z:
            squares = torch.logsumexp(logits, dim=1).square() * real_n
            total = total + losses.z / routing.mini_batch_tokens * squares.sum()
        if not (losses.balance or losses.sequence_balance):
            return total
        if self.score_function == "sigmoid":
            scores = torch.sigmoid(logits)
            scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
        else:
            scores = torch.softmax(logits, dim=1)
        scores = scores * real
        if losses.balance:
            assert routing.load is not None, "RoleRouting.before_update counts the load"
            mean = (scores * routing.load[self.row]).sum() / routing.mini_batch_tokens
            total = total + losses.balance * self.num_experts * mean
        if losses.sequence_balance:
            # the router's choices: routing_map lacks those that exceeded an expert's capacity
            assert self._taken is not None, "Megatron has called get_replay_topk"
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, self._taken, True)
            share = self._sequence_load(chosen & real, routing)
            mean = (scores * share).sum() / routing.mini_batch_sequences
            total = total + losses.sequence_balance * self.num_experts * mean
        return total

    def _sequence_load(self, chosen: Tensor, routing: MicroRouting) -> Tensor:
        """Per token, each expert's share of its sequence's choices over the length: ``[n, E]``.
        Sequences may be split over context- and sequence-parallel ranks."""
        assert routing.sequence_t is not None, "RoleRouting.before_update numbers the sequences"
        sequence_n = self._local(routing.sequence_t, len(chosen))
        counts = torch.zeros(
            routing.num_sequences + 1, self.num_experts, device=chosen.device
        ).index_add_(0, sequence_n, chosen.float())
        group = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
        if group.size() > 1:
            torch.distributed.all_reduce(counts, group=group)
        choices = counts.sum(1, keepdim=True)
        return (counts * self.topk / choices.square().clamp_min(1.0))[sequence_n]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if self.enable_expert_bias and torch.is_grad_enabled():
            real_n = self._local(self.packing.origin, len(routing_map)) >= 0
            self.local_tokens_per_expert += (routing_map & real_n[:, None]).sum(0)


def moe_layers(stages: Sequence[GPTModel]) -> Iterator[MoELayer]:
    """The mixture-of-experts blocks of a rank's chunks, in the order of the chunks."""
    for stage in stages:
        for layer in stage.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                yield layer.mlp


def routers(stages: Sequence[GPTModel]) -> list[Router]:
    """The routers of a rank's chunks, in the order of :func:`moe_layers`."""
    found = [layer.router for layer in moe_layers(stages)]
    assert all(isinstance(router, Router) for router in found), "layer_specs replaces the routers"
    return cast("list[Router]", found)


def pass_packing_to_routers(stage: GPTModel) -> None:
    """Set ``Router.packing`` before each forward pass of its layer, recomputation included."""
    for layer in stage.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(_pass_packing, with_kwargs=True)


def _pass_packing(layer, args, kwargs) -> None:
    params = kwargs["packed_seq_params"]
    layer.mlp.router.packing = getattr(params, "packing", params)


def freeze_routers(stage: GPTModel) -> None:
    """Freeze the router weights and the gates of shared experts."""
    for router in routers([stage]):
        router.requires_grad_(False)
    for layer in moe_layers([stage]):
        if layer.use_shared_expert and layer.shared_experts.gate_weight is not None:
            layer.shared_experts.gate_weight.requires_grad_(False)


def reduce_over_expert_data_parallel(stage: GPTModel, layout: Layout) -> None:
    """Make Megatron sum expert gradients over the ranks that hold the same expert shard. With EP =
    1 it would sum them over the dense data-parallel ranks, which is wrong if ETP != TP."""
    if layout.etp == layout.tp:
        return
    for layer in moe_layers([stage]):
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
