"""Scoring divided over the ranks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.batch.shares import bring_ids
from mppo.parallel.collectives import all_gather_objects, group_size
from mppo.parallel.exchange import Moves, exchange

T = TypeVar("T")


class ScoringError(RuntimeError):
    """Responses could not be scored. All ranks raise it at the same point of the program."""


def scoring_ranks(homes: Sequence[int], world: int) -> list[int]:
    """The rank that scores each response: at most ``ceil(responses / world)`` on every rank.

    A response is scored at its home, where its tokens are, unless that rank has more than its
    share: a server behind one rank must not leave all scoring to that rank.
    """
    share = -(-len(homes) // world)
    counts: Counter[int] = Counter()
    ranks = []
    for home in homes:
        counts[home] += 1
        ranks.append(home if counts[home] <= share else -1)
    free = (rank for rank in range(world) for _ in range(share - counts[rank]))
    return [next(free) if rank < 0 else rank for rank in ranks]


def score_divided(
    score: Callable[[Sequence[tuple[Prompt, Tensor]]], list[ResponseScore]],
    episodes: Sequence[Episode],
) -> list[ResponseScore]:
    """Score an even part of the responses on every rank and return all scores on every rank;
    ScoringError if it failed on some rank. Collective if there is a process group."""
    wanted: list[list[int]] = [[] for _ in range(group_size())]
    homes = [each.home for each in episodes]
    for number, rank in enumerate(scoring_ranks(homes, len(wanted))):
        wanted[rank].append(number)
    mine = bring_ids(episodes, wanted)
    scores: list[ResponseScore] = []
    failure: Exception | None = None
    try:
        pairs = [(episodes[number].prompt, ids) for number, ids in mine.items()]
        scores = score(pairs) if pairs else []
    except Exception as error:  # raised after the exchange, in which the other ranks wait
        failure = error
    found = exchange_scores(dict(zip(mine, scores)), dict(enumerate(episodes)), failure)
    return [found[number] for number in range(len(episodes))]


def exchange_scores(
    mine: Mapping[int, ResponseScore], episodes: Mapping[int, Episode], failure: Exception | None
) -> dict[int, ResponseScore]:
    """Gather the scores of all ranks, or raise ScoringError on all if one has a ``failure``
    (``exchange_results``). Collective if there is a process group.

    Rewards of tokens stay on, or move to, the rank that holds the response; those under a key that
    is not in ``episodes`` are dropped.
    """
    sent = {key: replace(each, token_rewards=()) for key, each in mine.items()}
    rewarded = [key for key, each in mine.items() if each.token_rewards and key in episodes]
    everyone = exchange_results((sent, rewarded), failure)
    rewards = _bring_rewards([rewarded for _, rewarded in everyone], mine, episodes)
    return {
        key: replace(each, token_rewards=rewards[key]) if key in rewards else each
        for scores, _ in everyone
        for key, each in scores.items()
    }


def _bring_rewards(
    rewarded: Sequence[Sequence[int]],
    mine: Mapping[int, ResponseScore],
    episodes: Mapping[int, Episode],
) -> dict[int, Sequence[float]]:
    """Token rewards of the responses whose home this rank is; collective if any move. ``rewarded``:
    keys of the responses with token rewards, by the rank that scored them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    scored = [(at, key) for at, keys in enumerate(rewarded) for key in keys]
    moving = [(at, key) for at, key in scored if episodes[key].home != at]
    wanted: list[list[int]] = [[] for _ in rewarded]
    for number, (_, key) in enumerate(moving):
        wanted[episodes[key].home].append(number)
    held = [number for number, (at, _) in enumerate(moving) if at == rank]
    own = [np.asarray(mine[moving[number][1]].token_rewards, np.float64) for number in held]
    values = torch.from_numpy(np.concatenate([np.empty(0), *own]))
    lengths = [episodes[key].length for _, key in moving]
    (came,) = exchange(Moves([at for at, _ in moving], wanted), lengths, held, lambda _: [values])
    rewards = {
        key: mine[key].token_rewards for at, key in scored if at == rank == episodes[key].home
    }
    parts = came.split([lengths[number] for number in wanted[rank]])
    for number, part in zip(wanted[rank], parts, strict=True):
        rewards[moving[number][1]] = array("d", part.numpy().tobytes())
    return rewards


def exchange_results(result: T, failure: Exception | None) -> list[T]:
    """Gather the results of all ranks, which can be pickled, or raise ScoringError on all with the
    message of a rank's ``failure``. Collective if there is a process group."""
    message = None if failure is None else str(failure)
    if message is not None and not isinstance(failure, ValueError):
        # the text of a KeyError, say, is only the key
        message = f"{type(failure).__name__}: {message}"
    everyone = all_gather_objects((result if message is None else None, message))
    if message is not None:
        raise ScoringError(message) from failure
    found: list[T] = []
    for rank, (theirs, why) in enumerate(everyone):
        if theirs is None:
            raise ScoringError(f"scoring failed on rank {rank}: {why}")
        found.append(theirs)
    return found
