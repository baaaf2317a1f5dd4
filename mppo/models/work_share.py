"""The sequences that a rank works on in a pass: from their homes, and the results back.

A pass needs ids and masks on all ranks of a data-parallel replica, what the loss reads only on the
last pipeline stage, expert choices only of the stage's own layers. One all-to-all moves them there,
and one the outputs back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import Sequences
from mppo.batch.head_outputs import HeadOutputs, tensors_of
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.mini_batch import PassInputs
from mppo.models.microbatch import MicroBatch
from mppo.parallel import device
from mppo.parallel.exchange import EVERYWHERE, Moves, exchange
from mppo.parallel.layout import Layout

_RANGES = 8
"""Ranges of micro-batches into which a pass is divided whose inputs are large."""
_SLOTS = 4
"""Micro-batches of a range per pipeline stage, at least: a range fills and drains the pipeline."""
_EXCHANGED_ROWS = 8192
"""Number of tokens whose hidden states one all-reduce exchanges between ranks."""


@dataclass(frozen=True)
class PassMoves:
    """The exchanges of a pass, as plain lists; of the batch only its homes are read."""

    layout: Layout
    plan: MicroBatchPlan
    batch: Sequences

    @cached_property
    def home(self) -> list[int]:
        return self.batch.home_B.tolist()

    @cached_property
    def shares(self) -> list[list[int]]:
        return [sorted(i for part in parts for i in part) for parts in self.plan]

    def alike(self, by_stage: bool) -> list[tuple[int, int]]:
        """For each rank, what is equal for ranks that get the same in ``outward``; ``by_stage``:
        pipeline stages get different tensors."""
        places = map(self.layout.coordinates, range(self.layout.world))
        return [(place.dp, place.pp if by_stage else 0) for place in places]

    def outward(self, last_stage_only: bool = False) -> Moves:
        """From the homes to all ranks that work on a sequence, or those of the last stage."""
        shares, wanted = self.shares, []
        for rank in range(self.layout.world):
            place = self.layout.coordinates(rank)
            needs = not last_stage_only or place.pp == self.layout.pp - 1
            wanted.append(shares[place.dp] if needs else [])
        return Moves(self.home, wanted)

    def back(self) -> Moves:
        """From the rank that reports a replica's results to the homes."""
        source = [EVERYWHERE] * len(self.home)
        for rank in range(self.layout.world):
            place = self.layout.coordinates(rank)
            if place.pp == self.layout.pp - 1 and place.tp == place.cp == 0:
                for number in self.shares[place.dp]:
                    source[number] = rank
        planned = sorted(number for share in self.shares for number in share)
        wanted: list[list[int]] = [[] for _ in range(self.layout.world)]
        for number in planned:
            ranks = range(self.layout.world)
            for rank in ranks if self.home[number] < 0 else [self.home[number]]:
                wanted[rank].append(number)
        return Moves(source, wanted)


def ranges_of(plan: MicroBatchPlan, stages: int, multiple: int) -> list[MicroBatchPlan]:
    """Divide a plan into ranges, whose numbers of micro-batches are multiples of ``multiple``."""
    count = len(plan[0])
    size = max(math.ceil(count / _RANGES), _SLOTS * stages if stages > 1 else 1)
    size = math.ceil(size / multiple) * multiple
    return [[parts[i : i + size] for parts in plan] for i in range(0, count, size)]


def fetch_share(
    batch: Sequences,
    moves: PassMoves,
    inputs: PassInputs,
    layers_of: Sequence[Sequence[int]] | None = None,
) -> tuple[Sequences, PassInputs]:
    """Bring the sequences of a pass, and its inputs, from their homes to the ranks that work on
    them. Collective. ``layers_of`` are the decoder layers whose expert choices each pipeline stage
    replays; None: no choices are needed."""
    if batch.is_replicated:
        return batch, inputs
    outward = moves.outward()
    rank, layout, hidden_T = dist.get_rank(), moves.layout, inputs.ref_hidden_T
    layers = None if layers_of is None else layers_of[layout.coordinates(rank).pp]
    codes_T = (batch.response_mask_T + 2 * batch.end_mask_T).to(torch.uint8)
    tokens_T = batch.tokens_T.int()

    def tensors_for(rank: int) -> list[Tensor]:
        tensors = [tokens_T, codes_T]
        if layers_of is not None:
            for run in _runs(layers_of[layout.coordinates(rank).pp]):
                tensors.append(batch.routed_experts_T[:, run])
        if hidden_T is not None:
            on_last = layout.coordinates(rank).pp == layout.pp - 1
            tensors.append(hidden_T if on_last else hidden_T[:, :0])
        return tensors

    lengths, held = batch.lengths_B.tolist(), batch.held_H.tolist()
    alike = moves.alike(by_stage=layers_of is not None or hidden_T is not None)
    got = exchange(outward, lengths, held, tensors_for, alike=alike)
    held_H = torch.tensor(outward.wanted[rank], dtype=torch.int64)
    changes: dict[str, Any] = {}
    if layers is not None:
        runs = got[2 : 2 + len(_runs(layers))]
        nothing = batch.routed_experts_T.new_empty(len(got[0]), 0, batch.routed_experts_T.shape[2])
        choices_T = runs[0] if len(runs) == 1 else torch.cat([nothing, *runs], dim=1)
        changes = {"routed_experts_T": choices_T, "expert_layers": tuple(layers)}
    share = Sequences(
        tokens_T=got[0].long(),
        cu_seqlens=cumulative(batch.lengths_B[held_H]),
        response_mask_T=(got[1] & 1).float(),
        end_mask_T=(got[1] >> 1).float(),
        held_H=held_H,
        **{f.name: getattr(batch, f.name) for f in fields(Sequences) if f.name.endswith("_B")},
        **changes,
    )
    return share, inputs if hidden_T is None else replace(inputs, ref_hidden_T=got[-1])


def _runs(layers: Sequence[int]) -> list[slice]:
    """Consecutive layers as slices, which copy nothing."""
    starts = [i for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1] + 1]
    ends = [*starts[1:], len(layers)] if starts else []
    return [slice(layers[a], layers[b - 1] + 1) for a, b in zip(starts, ends, strict=True)]


def output_rows(
    batch: Sequences, microbatches: Sequence[MicroBatch], parts: Sequence[HeadOutputs], count: int
) -> Tensor:
    """Outputs of micro-batches on the tokens of their batch: ``[T, count]`` (CPU), 0 elsewhere."""
    rows_Tk = torch.zeros(len(batch.tokens_T), count)
    if parts:
        where = torch.cat([microbatch.tokens_in(batch) for microbatch in microbatches])
        # one copy for all micro-batches
        rows_Tk[where] = torch.cat([torch.stack(tensors_of(part)) for part in parts], dim=1).cpu().T
    return rows_Tk


def return_home(batch: Sequences, moves: PassMoves, rows_Tk: Tensor) -> Tensor:
    """Send the results of a pass to the sequences' homes. Collective. From ``[T, k]`` (CPU) on the
    tokens of this rank's share, where only the values of reporting ranks count, to ``[T', k]`` on
    the tokens at home here, 0 for sequences that the pass left out."""
    rank = dist.get_rank()
    back, lengths = moves.back(), batch.lengths_B.tolist()
    (got,) = exchange(back, lengths, batch.held_H.tolist(), lambda _: [rows_Tk])
    home = batch.at_home(rank).tolist()
    if back.wanted[rank] == home:
        return got
    pieces = dict(zip(back.wanted[rank], got.split([lengths[i] for i in back.wanted[rank]])))
    nothing = [got.new_zeros(lengths[i], *got.shape[1:]) for i in home]
    return torch.cat([got[:0], *(pieces.get(i, zero) for i, zero in zip(home, nothing))])


def sum_states(hidden_T: Tensor, group: dist.ProcessGroup) -> None:
    """Sum hidden states ``[T, hidden]`` (CPU) over a context-parallel group in place; each rank has
    those of its own tokens, and zeros elsewhere. Collective."""
    for rows in hidden_T.split(_EXCHANGED_ROWS):
        exchanged = rows.float().to(device.device())
        dist.all_reduce(exchanged, group=group)
        rows.copy_(exchanged)
