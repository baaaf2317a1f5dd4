"""Exchange of responses between ranks: rows of all, and tokens where every rank needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import ResponsesBySample, Trajectory
from mppo.parallel.collectives import all_gather_objects, all_gather_varlen
from mppo.responses import ResponseRow, Responses
from mppo.rollout.engine import GenerationRequest


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
    known = [(key, each.finish_reason, each.parts) for key, each in mine.items()]
    everyone = all_gather_objects((known, _not_finite(mine)), world, group)
    for _, error in everyone:
        if error is not None:
            raise ValueError(error)
    return {
        key: ResponseRow(request.sample_at(key)[0], reason, parts, home)
        for home, (rows, _) in enumerate(everyone)
        for key, reason, parts in rows
    }


def _not_finite(mine: Mapping[int, Trajectory]) -> str | None:
    """An error message about the first log-probability that is not finite; None: all are."""
    for trajectory in mine.values():
        finite = trajectory.logprobs.isfinite()
        if not bool(finite.all()):
            return (
                f"rollout: log-probability {trajectory.logprobs[~finite][0].item()} in the "
                f"response to prompt {trajectory.prompt.uid}: the weights of version "
                f"{trajectory.weight_version} hold NaN or overflow (look at actor/grad_norm and "
                "lower actor.optim.lr, or use model.dtype = bfloat16 or float32)"
            )
    return None


def left_over(
    request: GenerationRequest,
    responses: Responses,
    world: int,
    group: dist.ProcessGroup | None,
    taken: Collection[int] = (),
) -> ResponsesBySample:
    """The responses that are not part of the result, without empty ones; collective.

    Every rank gets their tokens: any rank may continue a response, and one saves them.

    Args:
        request: the request.
        responses: by index in its result.
        world: ranks in ``group``.
        group: process group; None is the default one.
        taken: prompts (by index) whose responses are the result.
    """
    n = request.sampling.n
    kept = [
        place for place, row in responses.rows.items() if place // n not in taken and row.length
    ]
    everywhere = replicate(responses.select(kept), world, group)
    left = {}
    for place, trajectory in zip(kept, everywhere, strict=True):
        prompt, sample = request.sample_at(place)
        left[prompt.uid, sample] = trajectory
    return left


def replicate(
    responses: Responses, world: int, group: dist.ProcessGroup | None = None
) -> list[Trajectory]:
    """The trajectories of all responses, in order, on every rank; collective.

    Args:
        responses: numbered from 0.
        world: ranks in ``group``.
        group: process group; None is the default one.
    """
    rows, held = responses.rows, responses.held
    if world == 1 or not rows:
        return responses.trajectories
    tokens = _gather(rows, {i: t.response_ids for i, t in held.items()}, world, group)
    bits = {index: each.logprobs.view(torch.int32) for index, each in held.items()}
    logprobs = _gather(rows, bits, world, group)
    experts = _gather_experts(rows, held, world, group)
    return [
        Trajectory(
            row.prompt,
            tokens[index],
            logprobs[index].view(torch.float32),
            row.finish_reason,
            row.parts[-1][0],
            experts.get(index),
            row.parts[:-1],
        )
        for index, row in rows.items()
    ]


def _gather(
    rows: Mapping[int, ResponseRow],
    mine: Mapping[int, Tensor],
    world: int,
    group: dist.ProcessGroup | None,
) -> dict[int, Tensor]:
    """Every rank's int32 ``[L]`` tensors on every rank; collective."""
    held = [mine[index] for index in rows if index in mine]
    flat = torch.cat([torch.empty(0, dtype=torch.int32), *held])
    found: dict[int, Tensor] = {}
    for home, received in enumerate(all_gather_varlen(flat, world, group)):
        indices = [index for index, row in rows.items() if row.home == home]
        parts = received.split([rows[index].length for index in indices])
        found.update(zip(indices, parts, strict=True))
    return found


def _gather_experts(
    rows: Mapping[int, ResponseRow],
    held: Mapping[int, Trajectory],
    world: int,
    group: dist.ProcessGroup | None,
) -> dict[int, Tensor]:
    """Routed experts of the trajectories that have them, on every rank; collective."""
    mine = {
        index: x.contiguous()
        for index, each in held.items()
        if (x := each.routed_experts) is not None
    }
    shapes = all_gather_objects({i: tuple(x.shape) for i, x in mine.items()}, world, group)
    if not any(shapes):
        return {}
    # as bytes: not every backend gathers 16-bit integers
    nothing = torch.empty(0, dtype=torch.uint8)
    flat = torch.cat([nothing, *(x.view(torch.uint8).flatten() for x in mine.values())])
    found: dict[int, Tensor] = {}
    for theirs, received in zip(shapes, all_gather_varlen(flat, world, group), strict=True):
        sizes = [2 * torch.Size(shape).numel() for shape in theirs.values()]
        for (index, shape), part in zip(theirs.items(), received.split(sizes), strict=True):
            found[index] = part.view(torch.int16).view(shape)
    return found


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
