"""How episodes and the batch made of them are shared out over the ranks between passes.

Every rank holds the tokens of the sequences whose home it is, and computes their rewards,
advantages and targets (:mod:`mppo.batch.gathers`: what depends on all sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import Batch, unknown_expert
from mppo.batch.episode import Episode, EpisodeTokens
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


_NO_IDS = torch.empty(0, dtype=torch.int32)
_NO_LOGPROBS = torch.empty(0)
_NO_EXPERTS = torch.empty(0, dtype=torch.int16)


def bring_episodes(
    episodes: Sequence[Episode],
    wanted: Sequence[Sequence[int]],
) -> dict[int, Episode]:
    """Bring episodes from their homes to the ranks that want them, by the numbers ``wanted`` of
    each rank. Collective. Returns this rank's, by number in the order wanted; it is their home."""
    rank = dist.get_rank() if group_size() > 1 else 0
    moves = Moves([each.home for each in episodes], wanted)
    mine = wanted[rank]
    if moves.is_local:
        return {number: episodes[number] for number in mine}
    numbers = [number for number, each in enumerate(episodes) if each.tokens is not None]
    lengths = [each.length for each in episodes]
    tensors = [
        torch.cat([_NO_IDS, *(episodes[i].here.ids for i in numbers)]),
        torch.cat([_NO_LOGPROBS, *(episodes[i].here.logprobs for i in numbers)]),
    ]
    ids, logprobs = exchange(moves, lengths, numbers, lambda _: tensors)
    sizes = [lengths[number] for number in mine]
    experts: list[Tensor | None] = [None] * len(mine)
    if any(each.routed for each in episodes):
        experts = _bring_experts(episodes, moves, mine)
    parts = zip(mine, ids.split(sizes), logprobs.split(sizes), experts, strict=True)
    return {
        number: replace(episodes[number], home=rank, tokens=EpisodeTokens(own, values, chosen))
        for number, own, values, chosen in parts
    }


def bring_ids(episodes: Sequence[Episode], wanted: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Bring the token ids after the prompt, int32, alone, to the ranks of the default group that
    want them; as ``bring_episodes``. Collective."""
    homes = [each.home for each in episodes]
    moving = [[i for i in part if homes[i] != rank] for rank, part in enumerate(wanted)]
    sent = {number for part in moving for number in part}
    numbers = [i for i, each in enumerate(episodes) if i in sent and each.tokens is not None]
    ids = torch.cat([_NO_IDS, *(episodes[number].here.ids for number in numbers)])
    lengths = [each.length for each in episodes]
    (got,) = exchange(Moves(homes, moving), lengths, numbers, lambda _: [ids])
    rank = dist.get_rank() if group_size() > 1 else 0
    parts = got.split([lengths[number] for number in moving[rank]])
    came = dict(zip(moving[rank], parts, strict=True))
    return {i: came[i] if i in came else episodes[i].here.ids for i in wanted[rank]}


def bring_ids_to_first(episodes: Sequence[Episode]) -> list[Tensor]:
    """The token ids of all episodes on the first rank; no others. Collective."""
    elsewhere: list[Sequence[int]] = [()] * (group_size() - 1)
    return list(bring_ids(episodes, [range(len(episodes)), *elsewhere]).values())


def _bring_experts(
    episodes: Sequence[Episode], moves: Moves, mine: Sequence[int]
) -> list[Tensor | None]:
    """Experts of the episodes that this rank wants; collective."""
    shapes = [each.routed or (0, 0, 0) for each in episodes]
    sizes = [tokens * layers * chosen for tokens, layers, chosen in shapes]
    numbers = [number for number, each in enumerate(episodes) if each.tokens is not None]
    found = [episodes[number].here.experts for number in numbers]
    flat = [x.to(torch.int16).flatten() for x in found if x is not None]
    values = torch.cat([_NO_EXPERTS, *flat])
    (got,) = exchange(moves, sizes, numbers, lambda _: [values])
    parts = zip(mine, got.split([sizes[i] for i in mine]), strict=True)
    return [part.view(shapes[i]) if episodes[i].routed else None for i, part in parts]
