"""Collectives of Python objects, of flags and of tensors whose length differs between ranks.

All exchanges here are of CPU tensors: a rank that waits for the others must not occupy its GPU,
where a rollout server may be generating.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

T = TypeVar("T")

_LONGEST_PAUSE_S = 0.2
_waits: Counter[str] = Counter()
"""Calls of ``wait_for_ranks`` by default group; the same on all of its ranks."""


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in a group (None: the default one); 1 where no process group exists."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def all_gather_objects(
    value: T, world: int | None = None, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Every rank's object, in rank order, on every rank. Collective; with one rank nothing is
    exchanged. The objects are pickled: use this for a few kilobytes, outside hot loops."""
    world = group_size(group) if world is None else world
    gathered = [value] * world
    if world > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T) -> T:
    """The first rank's object, on every rank of the default group. Collective."""
    box = [value]
    if group_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def largest_of_ranks(values: Sequence[float]) -> list[float]:
    """The largest of every rank's values, equally many each, on every rank of the default group; a
    flag counts as 0 or 1. Collective."""
    largest = torch.tensor(values, dtype=torch.float64)
    if group_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def wait_for_ranks(world: int) -> None:
    """Wait until all ``world`` ranks of the default group have made this call. Collective. There is
    no time limit: use it where ranks arrive at very different times, as after generation, where a
    collective would time out. If a rank never arrives, the heartbeat ends the job."""
    if world == 1:
        return
    group = distributed_c10d._get_default_group()
    store = distributed_c10d._get_process_group_store(group)
    number = _waits[group.group_name] = _waits[group.group_name] + 1
    arrived, pause_s = store.add(f"mppo/wait/{number}", 1), 0.001
    while arrived < world:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        arrived = store.add(f"mppo/wait/{number}", 0)
    if dist.get_rank(group) == 0 and number > 1:  # no rank reads the previous key any more
        store.delete_key(f"mppo/wait/{number - 1}")


def raise_on_any_rank(error: str | None, world: int) -> None:
    """Raise a RuntimeError with the distinct errors of all ranks, in rank order, on all ``world``
    ranks of the default group if one has an error. Collective."""
    errors = dict.fromkeys(e for e in all_gather_objects(error, world) if e is not None)
    if errors:
        raise RuntimeError("; ".join(errors))


def all_gather_varlen(value: Tensor, world: int) -> list[Tensor]:
    """Every rank's ``[N]``, on any device and of one dtype, as tensors on the CPU in rank order on
    every rank of the default group; lengths may differ. Collective."""
    value = value.cpu()
    if world == 1:
        return [value]
    size = torch.tensor([value.numel()], dtype=torch.int64)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    counts = [int(s) for s in sizes]
    if not any(counts):
        return [value] * world
    # all_gather needs equal shapes: pad to the longest, cut afterwards
    padded = value.new_zeros(max(counts))
    padded[: value.numel()] = value
    received = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(received, padded)
    return [tensor[:count] for tensor, count in zip(received, counts, strict=True)]
