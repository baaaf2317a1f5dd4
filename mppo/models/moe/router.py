"""Megatron's top-k router with recorded or replayed choices and exact auxiliary losses.

What a router needs to know of a micro-batch (which tokens are padding, which experts to choose, by
what to divide) is a ``MicroRouting`` that travels with the micro-batch's packing, so it is the
right one in pipelines and in recomputation, where a layer's forward pass runs again later.

Shapes: ``t`` local tokens, ``n`` of them on this rank under sequence parallelism, ``L`` MoE layers
of this rank, ``E`` experts, ``k`` chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mppo.models.attention.packing import Packing


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Which losses on the router's scores, already divided for the mini-batch.

    Args:
        balance: coefficient of the load-balancing loss over the mini-batch.
        sequence_balance: coefficient of the same within each sequence, averaged over sequences.
        z: coefficient of the mean squared log-sum-exp of the logits.
    """

    balance: float = 0.0
    sequence_balance: float = 0.0
    z: float = 0.0

    @property
    def on(self) -> bool:
        """Whether any is used."""
        return bool(self.balance or self.sequence_balance or self.z)


@dataclass
class MicroRouting:
    """Routing of one micro-batch.

    Args:
        training: the pass is one of forward_backward.
        chosen: int64 ``[L, t, k]``, experts to take; -1 leaves the choice to the router. None:
            nothing is replayed.
        record: ``[L, t, k]``, filled with the experts taken. None: nothing is recorded.
        mini_batch_tokens: tokens of the mini-batch, over all ranks.
        mini_batch_sequences: its sequences.
        load: float32 ``[L, E]``, share of the mini-batch's choices that fell on each expert; None
            where no loss needs it.
        sequence_t: int64 ``[t]``, which of the micro-batch's sequences a token belongs to.
        num_sequences: of this micro-batch.
    """

    training: bool
    chosen: Tensor | None = None
    record: Tensor | None = None
    mini_batch_tokens: int = 1
    mini_batch_sequences: int = 1
    load: Tensor | None = None
    sequence_t: Tensor | None = None
    num_sequences: int = 0


class LayerLoad:
    """What one layer's router did since it was last read.

    ``choices`` counts tokens per expert ``[E]``; ``tokens`` those routed; ``differing`` the
    replayed choices that the router itself would not have made; ``auxiliary`` sums the losses.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(num_experts + 4, dtype=torch.float64, device=device)

    def add(self, choices: Tensor, tokens: Tensor) -> None:
        """Count one micro-batch."""
        self.sums[: len(choices)] += choices
        self.sums[-4] += tokens

    def add_differing(self, differing: Tensor, replayed: Tensor) -> None:
        """Count replayed choices, and those that differ."""
        self.sums[-3] += differing
        self.sums[-2] += replayed

    def add_auxiliary(self, loss: Tensor) -> None:
        """Sum the auxiliary losses."""
        self.sums[-1] += loss.detach()


class _Attach(torch.autograd.Function):
    """``output``; its backward pass also sends gradient 1 to ``loss``."""

    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, grad.new_ones(())


class Router(TopKRouter):
    """Megatron's router; the layer hands it the packing, the role says what to do (``prepare``)."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.packing: Packing | None = None
        self.row = 0
        self.losses = AuxiliaryLoss()
        self.load: LayerLoad | None = None
        self._taken: Tensor | None = None
        # Megatron asks an object, which must not be a submodule, for the choice
        self.router_replay = SimpleNamespace(get_replay_topk=self._choose)

    def prepare(self, row: int, losses: AuxiliaryLoss) -> None:
        """Set what the role asks of this layer.

        Args:
            row: which of the rank's MoE layers this is.
            losses: auxiliary losses.
        """
        self.row = row
        self.losses = losses
        self.load = LayerLoad(self.num_experts, self.weight.device)

    def _here(self, x_t: Tensor, n: int) -> Tensor:
        """This tensor-parallel rank's share of a quantity along the tokens (its first axis)."""
        if len(x_t) == n:
            return x_t
        first = self.tp_group.rank() * n
        return x_t[first : first + n]

    def _choose(self, scores, topk, num_groups, group_topk, choose):
        """In place of Megatron's top-k: scores and indices ``[n, k]`` taken."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routing = self.packing.routing
        if routing is None:
            return values, own
        taken = own
        if routing.chosen is not None:
            wanted = self._here(routing.chosen[self.row], len(own))
            known = wanted[:, :1] >= 0
            taken = torch.where(known, wanted, own)
            values = scores.gather(1, taken)
            if self._counting(routing):
                same = (taken[:, :, None] == own[:, None, :]).any(2)
                self.load.add_differing((~same & known).sum(), known.sum() * topk)
        if routing.record is not None:
            self._here(routing.record[self.row], len(own)).copy_(taken)
        self._taken = taken
        return values, taken

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None):
        """Weights and choices ``[n, E]``, with the auxiliary losses attached to the weights."""
        probs, routing_map = super().routing(logits)
        routing = self.packing.routing
        if routing is None:
            return probs, routing_map
        logits = logits.view(-1, self.num_experts)
        real_n = self._here(self.packing.origin, len(logits)) >= 0
        if self._counting(routing):
            self.load.add((routing_map & real_n[:, None]).sum(0), real_n.sum())
        if routing.training and torch.is_grad_enabled() and self.losses.on:
            loss = self._loss(logits, real_n, routing)
            self.load.add_auxiliary(loss)
            probs = _Attach.apply(probs, loss)
        return probs, routing_map

    def _counting(self, routing: MicroRouting) -> bool:
        """Once per micro-batch: recomputation runs the forward pass without gradient first."""
        return self.load is not None and routing.training == torch.is_grad_enabled()

    def _loss(self, logits: Tensor, real_n: Tensor, routing: MicroRouting) -> Tensor:
        """This rank's share of the mini-batch's auxiliary losses; the shares add up."""
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
            mean = (scores * routing.load[self.row]).sum() / routing.mini_batch_tokens
            total = total + losses.balance * self.num_experts * mean
        if losses.sequence_balance:
            # what was chosen: of routing_map a capacity may have dropped some
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, self._taken, True)
            share = self._sequence_load(chosen & real, routing)
            mean = (scores * share).sum() / routing.mini_batch_sequences
            total = total + losses.sequence_balance * self.num_experts * mean
        return total

    def _sequence_load(self, chosen: Tensor, routing: MicroRouting) -> Tensor:
        """Share of its sequence's choices on each expert, over its sequence's length: ``[n, E]``.

        Sequences may be split over context- and sequence-parallel ranks.
        """
        sequence_n = self._here(routing.sequence_t, len(chosen))
        counts = torch.zeros(
            routing.num_sequences + 1, self.num_experts, device=chosen.device
        ).index_add_(0, sequence_n, chosen.float())
        group = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
        if group.size() > 1:
            torch.distributed.all_reduce(counts, group=group)
        choices = counts.sum(1, keepdim=True)
        return (counts * self.topk / choices.square().clamp_min(1.0))[sequence_n]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens for the update of the expert bias, padding left out."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            real_n = self._here(self.packing.origin, len(routing_map)) >= 0
            self.local_tokens_per_expert += (routing_map & real_n[:, None]).sum(0)
