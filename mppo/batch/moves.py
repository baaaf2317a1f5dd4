"""Bringing the tokens of episodes to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch.episode import Episode, EpisodeTokens
from mppo.parallel.collectives import group_size
from mppo.parallel.exchange import Moves, exchange

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
