"""Scoring divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from mppo.parallel.collectives import all_gather_objects

T = TypeVar("T")
R = TypeVar("R")


class ScoringError(RuntimeError):
    """Responses could not be scored. All ranks raise it at the same point of the program."""


def score_divided(score: Callable[[Sequence[T]], list[R]], responses: Sequence[T]) -> list[R]:
    """Score every W-th response on each of W ranks and return all scores on every rank.

    A server, a sandbox or a slow verifier then scores each response once and not once per rank, and
    all ranks use the same score even if the reward function is not deterministic. Collective if
    there is a process group.

    Args:
        score: scores responses, or computes another result for each, or raises.
        responses: the same on every rank.

    Raises:
        ScoringError: scoring failed on some rank.
    """
    world, rank = 1, 0
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    mine = responses[rank::world]
    scores: list[R] = []
    failure: Exception | None = None
    try:
        scores = score(mine) if mine else []
    except Exception as error:  # raised after the exchange, in which the other ranks wait
        failure = error
    everyone = exchange_results(scores, failure)
    return [everyone[index % world][index // world] for index in range(len(responses))]


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
