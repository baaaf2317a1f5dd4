"""Dividing prompts over ranks, and bringing every rank's results to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Trajectory
from mppo.rollout.engine import GenerationRequest

T = TypeVar("T")
FINISH = ("length", "stop", "abort")
"""What ends a response, by the number it has on its way between ranks."""


def snake_partition(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Indices each rank works on: longest first, dealt to and fro.

    Args:
        lengths: cost of each item.
        world: number of ranks.

    Returns:
        ``world`` lists, disjoint, together all indices; counts differ by at most one.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    dealt: list[list[int]] = [[] for _ in range(world)]
    for position, index in enumerate(order):
        turn, seat = divmod(position, world)
        dealt[seat if turn % 2 == 0 else world - 1 - seat].append(index)
    return dealt


def all_gather_varlen(
    mine: Tensor, world: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Every rank's one-dimensional tensor, whatever its length, on every rank.

    Args:
        mine: ``[N]`` of this rank; same dtype and device kind on all.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Returns:
        ``world`` tensors, in rank order.
    """
    if world == 1:
        return [mine]
    size = torch.tensor([mine.numel()], dtype=torch.int64, device=mine.device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    counts = [int(s) for s in sizes]
    padded = mine.new_zeros(max(counts))
    padded[: mine.numel()] = mine
    received = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(received, padded, group=group)
    return [tensor[:count] for tensor, count in zip(received, counts, strict=True)]


def pack_rows(
    key_R: Tensor, length_R: Tensor, finish_R: Tensor, tokens: Tensor, logprobs: Tensor
) -> Tensor:
    """A rank's responses as one int32 tensor.

    Args:
        key_R: ``prompt index * n + sample`` of each row.
        length_R: tokens of each row.
        finish_R: what ended each row, as its place in ``FINISH``.
        tokens: integers, all rows end to end.
        logprobs: float32, likewise.

    Returns:
        int32: row count; keys, lengths, ends; tokens; bits of the log-probabilities.
    """
    count = torch.tensor([len(key_R)], dtype=torch.int32, device=key_R.device)
    head = torch.stack([key_R, length_R, finish_R.to(key_R.dtype)]).int().flatten()
    return torch.cat([count, head, tokens.int(), logprobs.float().view(torch.int32)])


def unpack_rows(packed: Tensor, request: GenerationRequest, version: int) -> dict[int, Trajectory]:
    """Trajectories by ``prompt index * n + sample``; the inverse of ``pack_rows``.

    Raises:
        ValueError: a log-probability is not finite (on every rank: all unpack the same).
    """
    packed = packed.cpu()
    rows = int(packed[0])
    keys, lengths, finish = packed[1 : 1 + 3 * rows].view(3, rows).tolist()
    body = packed[1 + 3 * rows :]
    half = len(body) // 2
    values = body[half:].view(torch.float32)
    _check_finite(values, keys, lengths, request, version)
    tokens, logprobs = body[:half].tolist(), values.tolist()
    found, at = {}, 0
    for key, length, reason in zip(keys, lengths, finish, strict=True):
        found[key] = Trajectory(
            prompt=request.sample_at(key)[0],
            response_ids=tuple(tokens[at : at + length]),
            logprobs=tuple(logprobs[at : at + length]),
            finish_reason=FINISH[reason],
            weight_version=version,
        )
        at += length
    return found


def _check_finite(
    values: Tensor,
    keys: Sequence[int],
    lengths: Sequence[int],
    request: GenerationRequest,
    version: int,
) -> None:
    if bool(values.isfinite().all()):
        return
    bad = int((~values.isfinite()).nonzero()[0])
    row = int(torch.searchsorted(torch.tensor(lengths).cumsum(0), bad, right=True))
    prompt, _ = request.sample_at(keys[row])
    raise ValueError(
        f"rollout: log-probability {values[bad].item()} in the response to prompt "
        f"{prompt.uid}: the weights of version {version} hold NaN or overflow "
        "(look at actor/grad_norm and lower actor.optim.lr, or use model.dtype = bfloat16 or "
        "float32)"
    )


def raise_on_any_rank(
    error: str | None, world: int, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank what went wrong on any.

    Raises:
        RuntimeError: some rank brought an error.
    """
    errors = gather_objects(error, world, group)
    told = list(dict.fromkeys(e for e in errors if e is not None))
    if told:
        raise RuntimeError("; ".join(told))


def gather_objects(mine: T, world: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's small object, in rank order, on every rank."""
    everyone = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone
