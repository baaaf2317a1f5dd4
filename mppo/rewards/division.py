"""Scoring divided over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from mppo.batch import Prompt
from mppo.parallel.collectives import all_gather_objects, group_size
from mppo.rewards.response import Response
from mppo.rewards.scores import ResponseScore

T = TypeVar("T")


class ScoringError(RuntimeError):
    """Responses could not be scored. All ranks raise it at the same point of the program."""


def scoring_ranks(homes: Sequence[int], world: int) -> list[int]:
    """The rank that scores each response: at most ``ceil(responses / world)`` on every rank.

    A response is scored where its tokens are, unless that rank has more than its share: a server
    behind one rank must not leave all scoring to that rank.

    Args:
        homes: rank that holds the tokens of each response.
        world: number of ranks.
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
    score: Callable[[Sequence[Response]], list[ResponseScore]],
    held: Mapping[int, Response],
    prompts: Sequence[Prompt],
    homes: Sequence[int],
) -> list[ResponseScore]:
    """Score an even part of the responses on every rank and return all scores on every rank.

    Collective if there is a process group. Responses that their home does not score move.

    Args:
        score: scores responses, or raises.
        held: this rank's responses by index.
        prompts: of all responses.
        homes: rank that holds each response.

    Raises:
        ScoringError: scoring failed on some rank.
    """
    world, rank = group_size(), _own_rank()
    ranks = scoring_ranks(homes, world)
    mine = {index: each for index, each in held.items() if ranks[index] == rank}
    if ranks != list(homes):
        moved = {i: (each.text, each.token_ids) for i, each in held.items() if ranks[i] != rank}
        for theirs in all_gather_objects(moved, world):
            for index, response in theirs.items():
                if ranks[index] == rank:
                    mine[index] = Response(prompts[index], *response)
    indices = sorted(mine)
    scores: list[ResponseScore] = []
    failure: Exception | None = None
    try:
        scores = score([mine[index] for index in indices]) if indices else []
    except Exception as error:  # raised after the exchange, in which the other ranks wait
        failure = error
    found = exchange_scores(dict(zip(indices, scores)), dict(enumerate(homes)), failure)
    return [found[index] for index in range(len(homes))]


def exchange_scores(
    mine: Mapping[int, ResponseScore], homes: Mapping[int, int], failure: Exception | None
) -> dict[int, ResponseScore]:
    """Gather the scores of all ranks, or raise on all. Collective if there is a process group.

    Rewards of tokens stay on, or move to, the rank that holds the response.

    Args:
        mine: scores on this rank.
        homes: the rank that holds each response; one without a home is held where it was scored.
        failure: see ``exchange_results``.

    Raises:
        ScoringError: some rank passed a failure.
    """
    rank = _own_rank()
    own = {key: each for key, each in mine.items() if homes.get(key, rank) == rank}
    sent = {key: each.without_tokens() if key in own else each for key, each in mine.items()}
    gathered = {k: each for part in exchange_results(sent, failure) for k, each in part.items()}
    elsewhere = {k: each.without_tokens() for k, each in gathered.items() if homes.get(k) != rank}
    return gathered | elsewhere | own


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def exchange_results(mine: T, failure: Exception | None) -> list[T]:
    """Gather the results of all ranks, or raise on all. Collective if there is a process group.

    Args:
        mine: this rank's result.
        failure: this rank's exception, None if it succeeded. The other ranks get its message.

    Returns:
        The results by rank.

    Raises:
        ScoringError: some rank passed a failure.
    """
    message = None
    if failure is not None:
        message = str(failure)
        if not isinstance(failure, ValueError):  # the text of a KeyError, say, is only the key
            message = f"{type(failure).__name__}: {message}"
    everyone = all_gather_objects((mine, message))
    if message is not None:
        raise ScoringError(message) from failure
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise ScoringError(f"scoring failed on rank {rank}: {message}")
    return [result for result, _ in everyone]
