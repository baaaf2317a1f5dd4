"""How a batch is shared out over the ranks between passes.

Every rank holds the tokens of the sequences whose home it is, and computes their rewards,
advantages and targets (:mod:`mppo.batch.gathers`: what depends on all sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algos.packing import cumulative
from mppo.batch.batch import Batch, unknown_expert
from mppo.batch.episode import Episode
from mppo.batch.packing import pack_episodes
from mppo.parallel.collectives import group_size
from mppo.parallel.exchange import Moves, exchange
from mppo.parallel.partition import partition

_UNEVEN = 1.5
"""Tokens of the fullest home over the mean, from which sequences get other homes."""


def pack_at_home(
    episodes: Sequence[Episode], end_slots_below: int = 0, bootstraps: bool = False
) -> Batch:
    """Pack scored episodes where their tokens are (``pack_episodes``), and set their homes."""
    batch = pack_episodes(episodes, end_slots_below, bootstraps)
    if group_size() == 1:
        return batch
    sequences = [each for episode in episodes for each in episode.sequences]
    home_B = torch.tensor([each.home for each in sequences], dtype=torch.int32)
    # expert choices are used only if all sequences with a response have them
    reported = {each.routed and each.routed[1:] for each in sequences if each.length}
    shape = (reported.pop() if len(reported) == 1 else None) or (0, 0)
    experts_T = batch.routed_experts_T
    if tuple(experts_T.shape[1:]) != shape:
        experts_T = torch.full((len(batch.tokens_T), *shape), -1, dtype=torch.int16)
    return replace(batch, home_B=home_B, routed_experts_T=experts_T)


def share_out(batch: Batch, num_experts: int | None = None) -> Batch:
    """Give sequences homes of nearly equal numbers of tokens, where this rank holds its own.
    Collective. Homes that are even enough stay, so that nothing moves twice. ``num_experts`` None:
    the actor's model has none."""
    if num_experts is not None and num_experts <= unknown_expert(torch.uint8):
        batch = replace(batch, routed_experts_T=narrow_choices(batch.routed_experts_T))
    world = group_size()
    if world == 1:
        return batch
    if not batch.is_replicated:
        loads = torch.zeros(world, dtype=torch.int64)
        loads.index_add_(0, batch.home_B.long(), batch.lengths_B)
        if loads.max() * world <= _UNEVEN * loads.sum():
            return batch
    lengths, rank = batch.lengths_B.tolist(), dist.get_rank()
    parts = partition(lengths, world)
    home_B = torch.empty(batch.num_sequences, dtype=torch.int32)
    for home, part in enumerate(parts):
        home_B[part] = home
    names = [f.name for f in fields(batch) if f.name.endswith("_T")]
    tensors = [getattr(batch, name) for name in names]
    moves = Moves(batch.home_B.tolist(), parts)
    got = exchange(moves, lengths, batch.held_H.tolist(), lambda _: tensors)
    held_H = torch.tensor(parts[rank], dtype=torch.int64)
    changes = dict(zip(names, got, strict=True))
    cu_seqlens = cumulative(batch.lengths_B[held_H])
    return replace(batch, held_H=held_H, cu_seqlens=cu_seqlens, home_B=home_B, **changes)


def narrow_choices(experts_T: Tensor) -> Tensor:
    """Expert choices below 255 as one byte each: int16 (-1 unknown) to uint8."""
    narrow_T = experts_T.to(torch.uint8)
    narrow_T[experts_T < 0] = unknown_expert(torch.uint8)
    return narrow_T
