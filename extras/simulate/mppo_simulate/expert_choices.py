"""The routers' choices on a simulated rank, and what the other ranks of an expert group choose.

Choices depend on numbers, which no simulated rank has. Here tokens take the experts in turn, so
that the choices of a rank, and with them the splits of all-to-alls, follow from the number of its
tokens. That number is known for every rank: a plan holds the micro-batches of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_capacity
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.microbatches import MicroBatchPlan
from mppo.models import role
from mppo.models.attention.context import ContextPlace, split_context
from mppo.models.microbatch import MicroBatch, padding_tokens
from mppo.models.moe import router
from mppo.parallel.device import copied
from mppo.parallel.layout import Layout
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.known_values import attach_values, known

EMPTY_SHARE = 0.25
"""Share of the experts to which no token goes on uneven ranks."""


@dataclass(frozen=True)
class _Peers:
    """A micro-batch on all data-parallel ranks.

    Args:
        layout: the role's layout.
        tokens: number of tokens that a router gets there, by data-parallel rank.
    """

    layout: Layout
    tokens: Sequence[int]


class ExpertChoices:
    """The stand-in for the choices of all routers of a rank.

    Args:
        counters: counts the micro-batches.
        uneven: no token goes to a quarter of the experts, and the choices that a batch brings along
            (R2, R3) are replaced, so that choices always follow from the number of tokens.
    """

    def __init__(self, counters: Counters, uneven: bool) -> None:
        self._counters, self._uneven = counters, uneven
        self._router: Any = None

    def install(self) -> None:
        """Replace the functions that choose, cut micro-batches and exchange numbers of tokens."""
        plain_choose, plain_cut = router.Router._choose, role.Role.cut
        plain_gather = token_dispatcher.gather_from_sequence_parallel_region
        plain_drop = megatron_router.apply_router_token_dropping

        def choose(chooser: Any, scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            return self._choose(plain_choose, chooser, scores, *args)

        def cut(owner: role.Role, batch: Sequences, plan: MicroBatchPlan) -> list[MicroBatch]:
            found = plain_cut(owner, batch, plan)
            self._follow(owner, batch, plan, found)
            return found

        def gather(counts: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found = plain_gather(counts, *args, **kwargs)
            if self._uneven and counts.ndim == 1 and counts.dtype is torch.int64:
                self._set_counts(counts, found, kwargs["group"])
            return found

        def drop(probs: Tensor, chosen: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            found, kept = plain_drop(probs, chosen, *args, **kwargs)
            _set_kept(chosen, kept, kwargs["router_topk"], kwargs["capacity_factor"])
            return found, kept

        for holder, name, replacement in (
            (megatron_router, "apply_router_token_dropping", drop),
            (router.Router, "_choose", choose),
            (role.Role, "cut", cut),
            (token_dispatcher, "gather_from_sequence_parallel_region", gather),
        ):
            setattr(holder, name, replacement)

    def _follow(
        self, owner: role.Role, batch: Sequences, plan: MicroBatchPlan, made: list[MicroBatch]
    ) -> None:
        """Count micro-batches, and attach what they are on other ranks."""
        lengths, layout = batch.lengths_B.tolist(), owner.layout
        for number, microbatch in enumerate(made):
            self._counters.micro_batch()
            sequences = [[lengths[i] for i in of_rank[number]] for of_rank in plan]
            tokens = [tokens_of_a_router(one, layout, owner.token_multiple) for one in sequences]
            packing: Any = microbatch.packing
            packing.peers = _Peers(layout, tokens)

    def _choose(self, plain: Any, chooser: Any, scores: Tensor, topk: int, num_groups: Any,
                group_topk: Any, choose: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
        def even(scores: Tensor, topk: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
            choose(scores, topk, **kwargs)
            (taken,) = copied([self._taken(scores.shape, topk)])
            return scores.gather(1, taken), taken

        values, taken = plain(chooser, scores, topk, num_groups, group_topk, even)
        if self._uneven:
            self._router = chooser
            attach_values(taken, self._taken(scores.shape, topk))
        return values, taken

    def _taken(self, shape: Sequence[int], topk: int) -> Tensor:
        """The experts of every token: int64 ``[tokens, topk]``; ``shape`` is that of the scores."""
        tokens, experts = shape
        places = torch.arange(tokens)[:, None] * topk + torch.arange(topk)
        return places % self._used(experts, topk)

    def _used(self, experts: int, topk: int) -> int:
        """Number of experts, from the first one, to which tokens go."""
        return max(topk, int((1 - EMPTY_SHARE) * experts)) if self._uneven else experts

    def _counts(self, tokens: int) -> Tensor:
        """Number of choices of every expert of the last router by a rank's tokens: int64 [E]."""
        config, topk = self._router.config, self._router.topk
        experts, places = self._router.num_experts, torch.arange(tokens * topk)
        counts = torch.bincount(places % self._used(experts, topk), minlength=experts)
        factor = config.moe_expert_capacity_factor
        if factor is None:
            return counts
        return counts.clamp(max=get_capacity(tokens * topk, experts, factor))

    def _set_counts(self, mine: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> None:
        """Set the gathered numbers of tokens by expert to those of each rank of the group."""
        peers: _Peers = self._router.packing.peers
        ranks = [peers.layout.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
        by_rank = [self._counts(peers.tokens[place.dp]) for place in ranks]
        own = known(mine)
        assert own is not None, "choices are known"
        assert torch.equal(own, by_rank[group.rank()]), (own, by_rank[group.rank()])
        attach_values(gathered, torch.cat(by_rank))


def _set_kept(chosen: Tensor, kept: Tensor, topk: int, factor: float) -> None:
    """Set the choices within every expert's capacity: the first ones (bool ``[tokens, E]``)."""
    tokens, experts = chosen.shape
    choices = known(chosen)
    if choices is not None:
        capacity = get_capacity(tokens * topk, experts, factor)
        attach_values(kept, choices & (choices.cumsum(0) <= capacity))


def tokens_of_a_router(lengths: list[int], layout: Layout, multiple: int) -> int:
    """Number of tokens that a rank's routers get of a micro-batch of these sequences."""
    if layout.cp > 1:
        local = len(split_context(lengths, ContextPlace(layout.cp, 0), multiple).origin_t)
    else:
        local = sum(lengths) + padding_tokens(sum(lengths), multiple)
    return local // multiple
