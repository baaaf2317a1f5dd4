"""The experts that a role's routers chose in a pass, for the sequences that this rank computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.gathers import sequence_digests
from mppo.parallel.exchange import Moves, exchange
from mppo.pipeline.microbatches import MicroBatchPlan


@dataclass(frozen=True)
class RoutingRecord:
    """Experts a role's own routers chose for a batch, in the layers of this rank.

    Sequences are known by their digests: equal sequences of one pass are routed equally, so the
    record also serves any selection of sequences. ``experts`` is ``[t, L, k]`` of each sequence
    that this data-parallel rank computed, ``holder`` the rank that computed it, ``nothing``
    ``[0, L, k]``.
    """

    experts: dict[int, Tensor]
    holder: dict[int, int]
    nothing: Tensor

    def covers(self, digests: Sequence[int]) -> bool:
        return all(digest in self.holder for digest in digests)

    def share(
        self,
        digests: Sequence[int],
        lengths: Sequence[int],
        shares: Sequence[Sequence[int]],
        place: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Bring the experts of sequences to the ranks that will replay them. Collective in a stage.

        Args:
            digests, lengths: of every sequence of a batch.
            shares: indices of the sequences that each data-parallel rank wants.
            place: this data-parallel rank.
            group: the data-parallel ranks that hold the same layers, on the CPU.

        Returns:
            ``[T', L, k]``, the sequences of this rank's share in their order.
        """
        planned = sorted({number for share in shares for number in share})
        source = [0] * len(digests)
        for number in planned:
            source[number] = self.holder[digests[number]]
        held = [number for number in planned if source[number] == place]
        mine = torch.cat([self.nothing, *(self.experts[digests[number]] for number in held)])
        return exchange(Moves(source, shares), lengths, held, lambda _: [mine], group)[0]


def record_of(
    batch: Sequences, plan: MicroBatchPlan, experts: Tensor, numbers: Sequence[int], place: int
) -> RoutingRecord:
    """Make a record of this rank's sequences of a plan, whose ``experts`` are ``[T', L, k]``."""
    digests = sequence_digests(batch).tolist()
    holder: dict[int, int] = {}
    for rank, parts in enumerate(plan):
        for part in parts:
            for number in part:
                holder.setdefault(digests[number], rank)
    pieces = experts.split(batch.lengths_B[list(numbers)].tolist())
    mine = {
        digests[number]: piece
        for number, piece in zip(numbers, pieces, strict=True)
        if holder[digests[number]] == place
    }
    return RoutingRecord(mine, holder, experts[:0])
