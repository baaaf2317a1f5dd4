"""Collectives of Python objects and of tensors whose length differs between ranks.

``torch.distributed``'s own calls serve tensors of equal shape. Every other exchange of the package
goes through this module, except the one in ``mppo.cpu.shared_memory``, which implements collectives
for the CPU and lies below.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in a group; 1 where no process group exists.

    Args:
        group: process group; None is the default one.
    """
    return dist.get_world_size(group) if dist.is_initialized() else 1


def all_gather_objects(
    value: T, world: int | None = None, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Every rank's object, on every rank. Collective.

    The objects are pickled: use this for a few kilobytes, outside hot loops.

    Args:
        value: of this rank.
        world: ranks in ``group``; None: ``group_size(group)``. With 1 nothing is exchanged.
        group: process group; None is the default one.

    Returns:
        ``world`` objects, in rank order.
    """
    world = group_size(group) if world is None else world
    gathered = [value] * world
    if world > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T) -> T:
    """The first rank's object, on every rank of the default group. Collective.

    Args:
        value: of this rank; only the first rank's counts.
    """
    box = [value]
    if group_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def raise_on_any_rank(
    error: str | None, world: int, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if any rank has an error. Collective.

    Args:
        error: of this rank; None: none.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Raises:
        RuntimeError: with the distinct errors of all ranks, in rank order.
    """
    errors = dict.fromkeys(e for e in all_gather_objects(error, world, group) if e is not None)
    if errors:
        raise RuntimeError("; ".join(errors))


def barrier(world: int, group: dist.ProcessGroup | None = None) -> None:
    """Return once every rank has called this. Collective.

    ``torch.distributed.barrier`` occupies the device of a rank that waits.

    Args:
        world: ranks in ``group``.
        group: process group; None is the default one.
    """
    all_gather_objects(None, world, group)


def all_gather_varlen(
    value: Tensor, world: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Every rank's one-dimensional tensor, on every rank; lengths may differ. Collective.

    Args:
        value: ``[N]`` of this rank; same dtype and kind of device on all ranks.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Returns:
        ``world`` tensors, in rank order.
    """
    if world == 1:
        return [value]
    size = torch.tensor([value.numel()], dtype=torch.int64, device=value.device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    counts = [int(s) for s in sizes]
    # all_gather needs equal shapes: pad to the longest, cut afterwards
    padded = value.new_zeros(max(counts))
    padded[: value.numel()] = value
    received = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(received, padded, group=group)
    return [tensor[:count] for tensor, count in zip(received, counts, strict=True)]
