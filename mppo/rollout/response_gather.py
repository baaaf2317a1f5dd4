"""What all ranks know of the responses that each received, as one exchange of flat tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import OPEN, Prompt, Trajectory
from mppo.parallel.collectives import all_gather_varlen
from mppo.responses import ResponseRow, Responses, ResponsesBySample, shape_of_experts
from mppo.rollout.engine import GenerationRequest

_REASONS = ("stop", "length", "abort", OPEN)
_NO_EXPERTS = (-1, -1, -1)


def gather_rows(
    mine: Mapping[int, Trajectory],
    request: GenerationRequest,
    world: int,
    group: dist.ProcessGroup | None,
) -> dict[int, ResponseRow]:
    """What every rank knows of the responses that all ranks received; collective.

    Args:
        mine: responses of this rank by their index in the result of the request.
        request: the request.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Raises:
        ValueError: on every rank, if a log-probability is not finite.
    """
    everyone = all_gather_varlen(_table(mine), world, group)
    rows: dict[int, ResponseRow] = {}
    for home, table in enumerate(everyone):
        rows.update(_read_table(table, request, home))
    return rows


def _table(mine: Mapping[int, Trajectory]) -> Tensor:
    """A rank's rows as int64 numbers.

    The first log-probability that is not finite (whether there is one, key, version, bits); then
    for each response key, finish reason, shape of the experts, number of parts, and its parts.
    """
    numbers = [0, 0, 0, 0]
    for key, trajectory in mine.items():
        finite = trajectory.logprobs.isfinite()
        if not numbers[0] and not bool(finite.all()):
            bits = trajectory.logprobs[~finite][:1].view(torch.int32).item()
            numbers[:4] = [1, key, trajectory.weight_version, int(bits)]
        shape = shape_of_experts(trajectory) or _NO_EXPERTS
        parts = trajectory.parts
        numbers += [key, _REASONS.index(trajectory.finish_reason), *shape, len(parts)]
        numbers += [number for part in parts for number in part]
    return torch.tensor(numbers, dtype=torch.int64)


def _read_table(table: Tensor, request: GenerationRequest, home: int) -> dict[int, ResponseRow]:
    """The rows of a rank.

    Raises:
        ValueError: a log-probability is not finite.
    """
    numbers = iter(table.tolist())
    spoiled, key, version, bits = islice(numbers, 4)
    if spoiled:
        raise ValueError(_not_finite(request.sample_at(key)[0], version, bits))
    rows: dict[int, ResponseRow] = {}
    for key in numbers:
        reason, *shape, count = islice(numbers, 5)
        parts = tuple((next(numbers), next(numbers)) for _ in range(count))
        routed = None if tuple(shape) == _NO_EXPERTS else (shape[0], shape[1], shape[2])
        prompt = request.sample_at(key)[0]
        rows[key] = ResponseRow(prompt, _REASONS[reason], parts, home, routed)
    return rows


def joined(before: Trajectory | None, more: Trajectory) -> Trajectory:
    """Append a continuation to an earlier part of a response."""
    if before is None:
        return more
    return replace(
        more,
        response_ids=torch.cat([before.response_ids, more.response_ids]),
        logprobs=torch.cat([before.logprobs, more.logprobs]),
        earlier=before.parts,
    )


def _not_finite(prompt: Prompt, version: int, bits: int) -> str:
    """The error about a log-probability with these bits."""
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
    return (
        f"rollout: log-probability {value} in the response to prompt {prompt.uid}: the weights of "
        f"version {version} hold NaN or overflow (look at actor/grad_norm and "
        "lower actor.optim.lr, or use model.dtype = bfloat16 or float32)"
    )


def left_over(
    request: GenerationRequest, responses: Responses, taken: Collection[int] = ()
) -> ResponsesBySample:
    """The responses that are not part of the result, without empty ones, at their homes.

    Args:
        request: the request.
        responses: by index in its result.
        taken: prompts (by index) whose responses are the result.
    """
    n = request.sampling.n
    keys: dict[int, tuple[int, int]] = {}
    for place, row in responses.rows.items():
        if place // n not in taken and row.length:
            prompt, sample = request.sample_at(place)
            keys[place] = prompt.uid, sample
    return ResponsesBySample(
        {key: responses.rows[place] for place, key in keys.items()},
        {key: responses.held[place] for place, key in keys.items() if place in responses.held},
    )


def cut_rows(
    keys: Sequence[int],
    lengths: Sequence[int],
    reasons: Sequence[str],
    tokens: Tensor,
    logprobs: Tensor,
    request: GenerationRequest,
    version: int,
) -> dict[int, Trajectory]:
    """Trajectories from flat tensors.

    Args:
        keys: index of each response in the result of the request.
        lengths: tokens of each response.
        reasons: finish reason of each response.
        tokens: token ids of all responses, concatenated.
        logprobs: log-probabilities of the same tokens.
        request: the request.
        version: of the weights.
    """
    parts = zip(keys, reasons, tokens.split(lengths), logprobs.split(lengths), strict=True)
    return {
        key: Trajectory(request.sample_at(key)[0], ids, values, reason, version)
        for key, reason, ids, values in parts
    }
