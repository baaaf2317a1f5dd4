"""Scoring divided over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from mppo.batch import Prompt
from mppo.parallel.collectives import all_gather_objects
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
    texts: Mapping[int, str],
    prompts: Sequence[Prompt],
    homes: Sequence[int],
) -> list[ResponseScore]:
    """Score an even part of the responses on every rank and return all scores on every rank.

    A server, a sandbox or a slow verifier then scores each response once and not once per rank, and
    all ranks use the same score even if the reward function is not deterministic. Collective if
    there is a process group. Texts that their home does not score move as text.

    Args:
        score: scores responses, or raises.
        texts: this rank's responses by index.
        prompts: of all responses.
        homes: rank that has the text of each response.

    Raises:
        ScoringError: scoring failed on some rank.
    """
    world, rank = 1, 0
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    ranks = scoring_ranks(homes, world)
    mine = {index: text for index, text in texts.items() if ranks[index] == rank}
    if ranks != list(homes):
        moved = {index: text for index, text in texts.items() if ranks[index] != rank}
        for theirs in all_gather_objects(moved, world):
            mine |= {index: text for index, text in theirs.items() if ranks[index] == rank}
    indices = sorted(mine)
    scores: list[ResponseScore] = []
    failure: Exception | None = None
    try:
        responses = [Response(prompts[index], mine[index]) for index in indices]
        scores = score(responses) if responses else []
    except Exception as error:  # raised after the exchange, in which the other ranks wait
        failure = error
    everyone = exchange_results(dict(zip(indices, scores)), failure)
    found = {index: each for part in everyone for index, each in part.items()}
    return [found[index] for index in range(len(prompts))]


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
