"""Judging shared out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from mppo.parallel.collectives import all_gather_objects
from mppo.rewards.judgement import Judgement
from mppo.rewards.response import Response

T = TypeVar("T")


class ScoringError(RuntimeError):
    """Responses could not be judged. Raised on every rank, at the same place."""


def score_divided(
    judge: Callable[[Sequence[Response]], list[Judgement]], responses: Sequence[Response]
) -> list[Judgement]:
    """Each rank judges every W-th response; all ranks get all judgements.

    So a server, a sandbox or a slow verifier does the work once and not once per rank, and a judge
    that does not always say the same cannot make ranks disagree. Collective where a process group
    is there.

    Args:
        judge: judges responses, or raises.
        responses: the same on every rank.

    Raises:
        ScoringError: judging failed on some rank.
    """
    world, rank = 1, 0
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    mine = responses[rank::world]
    judgements: list[Judgement] = []
    failure: Exception | None = None
    try:
        judgements = judge(mine) if mine else []
    except Exception as error:  # told to the other ranks first, or they would wait for this one
        failure = error
    everyone = exchange_results(judgements, failure)
    return [everyone[index % world][index // world] for index in range(len(responses))]


def exchange_results(mine: T, failure: Exception | None) -> list[T]:
    """Every rank's result, or every rank's failure. Collective where a process group is there.

    Args:
        mine: this rank's.
        failure: what went wrong here, told to the others, which would wait for this rank otherwise.

    Raises:
        ScoringError: it failed on some rank.
    """
    message = None
    if failure is not None:
        message = str(failure)
        if not isinstance(failure, ValueError):  # its text alone may be no more than a name
            message = f"{type(failure).__name__}: {message}"
    everyone = all_gather_objects((mine, message))
    if message is not None:
        raise ScoringError(message) from failure
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise ScoringError(f"scoring failed on rank {rank}: {message}")
    return [result for result, _ in everyone]
