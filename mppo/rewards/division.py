"""Judging shared out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from mppo.rewards.response import Judge, Response

T = TypeVar("T")
Check = Callable[[Sequence[float], Sequence[Response]], list[float]]


def judge_divided(judge: Judge, responses: Sequence[Response], check: Check) -> list[float]:
    """Each rank judges every W-th response; all ranks get all scores.

    So a server, a sandbox or a slow verifier does the work once and not once per rank, and a judge
    that does not always say the same cannot make ranks disagree. Collective where a process group
    is there.

    Args:
        judge: raw scores of responses.
        responses: the same on every rank.
        check: turns raw scores into floats, or raises.

    Raises:
        ValueError: judging failed on some rank; on that rank its own error.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return check(judge(responses), responses)
    mine = responses[dist.get_rank() :: world]
    scores: list[float] = []
    failure: Exception | None = None
    try:
        scores = check(judge(mine), mine) if mine else []
    except Exception as error:  # told to the other ranks first, or they would wait for this one
        failure = error
    everyone = exchange(scores, failure)
    return [everyone[index % world][index // world] for index in range(len(responses))]


def exchange(mine: T, failure: Exception | None) -> list[T]:
    """Every rank's result, or every rank's failure. Collective where a process group is there.

    Args:
        mine: this rank's.
        failure: what went wrong here, told to the others, which would wait for this rank otherwise.

    Raises:
        ValueError: it failed on some rank; on that rank its own error.
    """
    everyone: list[tuple[T, str | None]] = [(mine, None)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (mine, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise ValueError(f"scoring failed on rank {rank}: {message}")
    return [result for result, _ in everyone]
