"""Collectives on large tensors between ranks of one machine, through shared memory.

gloo sends every tensor over a socket: the kernel copies each byte several times, and gloo's thread
and the rank's own wake each other for each piece. Here each rank writes its tensor to memory that
the others read, and gloo only provides the barrier. For a group whose ranks cannot map one file
(several machines, different containers, not Linux) :func:`shared_memory_of` returns None, and the
group uses gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.cpu.anonymous_file import TOKEN, AnonymousFile, can_offer, map_offered
from mppo.cpu.by_group import ByGroup

SMALLEST = 1 << 20
"""Bytes of a tensor from which shared memory is faster than gloo."""

_TOTAL = 64 << 20
"""Bytes mapped per group, for all ranks together; pages never written take no memory."""


class SharedMemory:
    """Two halves with one slot per rank of a group.

    Exchanges alternate between the halves. Before a rank writes to a half again, it has passed the
    barrier of the other half, which every rank reaches only after reading the first.

    Args:
        memory: uint8, the mapped file.
        group: the ranks that share it.
    """

    def __init__(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._world = (
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        self._halves = memory[TOKEN:].view(2, self._world, -1)
        self._next = 0

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over the ranks in place; the result is bitwise equal on every rank."""
        for chunk in x.view(-1).split(self._capacity(x)):
            slots = self._exchange(chunk)
            bounds = [len(chunk) * rank // self._world for rank in range(self._world + 1)]
            parts = [slice(*bounds[rank : rank + 2]) for rank in range(self._world)]
            mine = parts[self._rank]
            # every rank sums one part of all slots into its own slot, then copies all the sums
            for step in range(1, self._world):
                other = (self._rank + step) % self._world
                slots[self._rank, mine].add_(slots[other, mine])
            dist.barrier(self._group)
            for rank, part in enumerate(parts):
                chunk[part] = slots[rank, part]

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """Sum ``x`` over the ranks and write this rank's equal part to ``output``."""
        rows, out = x.view(self._world, -1), output.view(-1)
        width = self._capacity(x) // self._world
        for part, into in zip(rows.split(width, 1), out.split(width)):
            slots = self._exchange(part).view(self._world, self._world, -1)
            torch.sum(slots[:, self._rank], 0, out=into)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write the ``x`` of all ranks to ``output``, in rank order."""
        rows = output.view(self._world, -1)
        width = self._capacity(x)
        for part, into in zip(x.view(-1).split(width), rows.split(width, 1)):
            into.copy_(self._exchange(part))

    def _capacity(self, x: Tensor) -> int:
        """Elements of the dtype of ``x`` per slot."""
        return self._halves.shape[-1] // x.element_size()

    def _exchange(self, mine: Tensor) -> Tensor:
        """Write ``mine`` and return the slots of all ranks, ``[ranks, elements of mine]``."""
        half = self._halves[self._next].view(mine.dtype)[:, : mine.numel()]
        self._next = 1 - self._next
        half[self._rank].view(mine.shape).copy_(mine)
        dist.barrier(self._group)
        return half


def shared_memory_of(group: dist.ProcessGroup | None) -> SharedMemory | None:
    """The memory that a group's ranks share, or None. Collective on the first call for a group."""
    return _memories.of(group)


def _share(group: dist.ProcessGroup) -> SharedMemory | None:
    """Map one file in every rank."""
    world = dist.get_world_size(group)
    size = TOKEN + _TOTAL // (2 * world * TOKEN) * (2 * world * TOKEN)
    file = AnonymousFile(size) if dist.get_rank(group) == 0 and can_offer() else None
    offers: list = [None] * world
    dist.all_gather_object(offers, file and file.offer, group)
    memory = map_offered(offers[0])
    mapped: list = [None] * world
    dist.all_gather_object(mapped, memory is not None, group)
    if file is not None:
        file.close()
    return SharedMemory(memory, group) if all(mapped) and memory is not None else None


_memories = ByGroup(_share)
