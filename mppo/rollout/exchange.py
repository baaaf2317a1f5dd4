"""Dividing prompts over ranks, and bringing every rank's results to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def shares(lengths: Sequence[int], world: int) -> list[list[int]]:
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


def gather_flat(mine: Tensor, world: int, group: dist.ProcessGroup | None = None) -> list[Tensor]:
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
