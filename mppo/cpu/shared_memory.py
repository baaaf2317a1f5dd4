"""Collectives on large tensors between ranks of one machine, through memory they share.

gloo carries every tensor over a socket: each byte is copied several times by the kernel, and gloo's
thread and the rank's own wake each other for each piece. Here each rank writes its tensor where the
others read it, and gloo only says when all have. A group whose ranks cannot map one file (several
machines, other containers, no Linux) gets None from :func:`shared_memory_of` and stays with gloo.
"""

from __future__ import annotations

import os
import platform
import secrets

import torch
import torch.distributed as dist
from torch import Tensor

SMALLEST = 1 << 20
"""Bytes from which shared memory is faster than gloo."""

_TOTAL = 64 << 20
"""Bytes mapped for a group, all ranks together; pages never written take no memory."""

_TOKEN = 64
"""Bytes before the slots, which begin with random ones that prove the file is the right one."""


class SharedMemory:
    """Slots of one group, one per rank, twice.

    Every exchange takes the other half: a rank that writes a half again has met all others in
    between, and so none still reads it.

    Args:
        memory: uint8, the mapped file.
        group: whose ranks share it.
    """

    def __init__(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._world = (
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        self._halves = memory[_TOKEN:].view(2, self._world, -1)
        self._next = 0

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over the ranks in place; every rank gets the same bits."""
        for chunk in x.view(-1).split(self._capacity(x)):
            slots = self._exchange(chunk)
            bounds = [len(chunk) * rank // self._world for rank in range(self._world + 1)]
            parts = [slice(*bounds[rank : rank + 2]) for rank in range(self._world)]
            mine = parts[self._rank]
            for step in range(1, self._world):
                other = (self._rank + step) % self._world
                slots[self._rank, mine].add_(slots[other, mine])
            dist.barrier(self._group)
            for rank, part in enumerate(parts):
                chunk[part] = slots[rank, part]

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """Sum equal parts of ``x`` over the ranks; ``output`` gets this rank's."""
        rows, out = x.view(self._world, -1), output.view(-1)
        width = self._capacity(x) // self._world
        for part, into in zip(rows.split(width, 1), out.split(width)):
            slots = self._exchange(part).view(self._world, self._world, -1)
            torch.sum(slots[:, self._rank], 0, out=into)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """``output`` gets the ``x`` of all ranks, one after the other."""
        rows = output.view(self._world, -1)
        width = self._capacity(x)
        for part, into in zip(x.view(-1).split(width), rows.split(width, 1)):
            into.copy_(self._exchange(part))

    def _capacity(self, x: Tensor) -> int:
        """Elements like those of ``x`` in a slot."""
        return self._halves.shape[-1] // x.element_size()

    def _exchange(self, mine: Tensor) -> Tensor:
        """What every rank has brought: ``[ranks, elements of mine]``, in the shared memory."""
        half = self._halves[self._next].view(mine.dtype)[:, : mine.numel()]
        self._next = 1 - self._next
        half[self._rank].view(mine.shape).copy_(mine)
        dist.barrier(self._group)
        return half


_known: dict[dist.ProcessGroup, SharedMemory | None] = {}
_known_of: list[dist.ProcessGroup | None] = [None]


def shared_memory_of(group: dist.ProcessGroup | None) -> SharedMemory | None:
    """The memory that a group's ranks share; None where they cannot. Collective the first time."""
    world = dist.group.WORLD
    if _known_of[0] is not world:  # the groups of a world that was destroyed
        _known.clear()
        _known_of[0] = world
    group = group or world
    if group not in _known:
        _known[group] = _share(group)
    return _known[group]


def _share(group: dist.ProcessGroup) -> SharedMemory | None:
    """Map one anonymous file in every rank, through the process that made it."""
    world = dist.get_world_size(group)
    size = _TOKEN + _TOTAL // (2 * world * _TOKEN) * (2 * world * _TOKEN)
    made = None
    if dist.get_rank(group) == 0 and hasattr(os, "memfd_create"):
        token = secrets.token_bytes(_TOKEN // 2)
        file = os.memfd_create("mppo")
        os.ftruncate(file, size)
        os.pwrite(file, token, 0)
        made = (platform.node(), f"/proc/{os.getpid()}/fd/{file}", token)
    offers: list = [None] * world
    dist.all_gather_object(offers, made, group)
    memory = _mapped(offers[0], size)
    mapped: list = [None] * world
    dist.all_gather_object(mapped, memory is not None, group)
    if made is not None:
        os.close(file)
    return SharedMemory(memory, group) if all(mapped) and memory is not None else None


def _mapped(offer: tuple[str, str, bytes] | None, size: int) -> Tensor | None:
    """The offered file as uint8 ``[size]``; None where it is not to be had here."""
    if offer is None or offer[0] != platform.node():
        return None
    _, path, token = offer
    try:
        with open(path, "rb") as file:
            # another container's process may have the same number: leave its files alone
            if os.fstat(file.fileno()).st_size != size or file.read(len(token)) != token:
                return None
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError):  # not to be opened or mapped here: gloo carries, on every rank
        return None
