"""One copy of tensors for all ranks of a node that need the same ones.

A rank puts its tensors into memory that the others of its node map. The memory has no name in any
file system. It exists as long as a process has it open or mapped: whatever kills the ranks, nothing
is left behind.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TOKEN = 64
"""Bytes at the beginning of a file; random ones at the start identify it."""


class FileOffer(NamedTuple):
    """Where another process of the same machine (``node``) finds a file: through /proc of the
    process that made it. Its size includes the token, its first bytes."""

    node: str
    path: str
    size: int
    token: bytes


class AnonymousFile:
    """A file of ``size`` bytes, with those of the token, that this process made and others may map
    until it is closed."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("mppo")
        os.ftruncate(self._file, size)
        token = secrets.token_bytes(TOKEN // 2)
        os.pwrite(self._file, token, 0)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.offer = FileOffer(platform.node(), path, size, token)

    def close(self) -> None:
        """Make the file unreachable for those who have not mapped it yet."""
        os.close(self._file)


def map_offered(offer: FileOffer | None) -> Tensor | None:
    """The offered file as uint8 ``[size]``; None if this process cannot map it."""
    if offer is None or offer.node != platform.node():
        return None
    try:
        with open(offer.path, "rb") as file:
            # in another container the process number may denote an unrelated process
            known = os.fstat(file.fileno()).st_size == offer.size
            if not known or file.read(len(offer.token)) != offer.token:
                return None
        return torch.from_file(offer.path, shared=True, size=offer.size, dtype=torch.uint8)
    except (OSError, RuntimeError):  # cannot be opened or mapped
        return None


def nodes_of(group: dist.ProcessGroup | None) -> list[int]:
    """The first rank whose memory each rank can map: ranks with equal numbers share a node.
    Collective on the first call for a group of CPU ranks (None: the default one)."""
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    if group not in _nodes:
        _nodes[group] = _find_nodes(group)
    return _nodes[group]


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def _find_nodes(group: dist.ProcessGroup) -> list[int]:
    file = AnonymousFile(TOKEN) if hasattr(os, "memfd_create") else None
    offers = _all_gather(None if file is None else file.offer, group)
    reached = (rank for rank, offer in enumerate(offers) if map_offered(offer) is not None)
    found = _all_gather(next(reached, dist.get_rank(group)), group)
    if file is not None:
        file.close()
    return found


def _all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def first_on_node(
    alike: Sequence[Hashable], nodes: Sequence[int], wanted: Sequence[Sequence[int]]
) -> list[int]:
    """For each rank the first one on its node that needs the same tensors; itself for none."""
    first: dict[tuple[Hashable, int], int] = {}
    return [
        first.setdefault((alike[rank], nodes[rank]), rank) if wanted[rank] else rank
        for rank in range(len(wanted))
    ]


def share_on_node(
    tensors: Sequence[Tensor] | None,
    like: Sequence[tuple[Sequence[int], torch.dtype]],
    source: int | None,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Give the tensors of one rank of a node to others of it, without a copy for each. Collective.

    Nobody may write to the result: the tensors in the shared memory, empty on a rank that neither
    gives nor gets any.

    Args:
        tensors: on a rank that gives them; None on the others.
        like: shapes and dtypes of the tensors that this rank gives or gets.
        source: rank in ``group`` from which this rank gets them; None: it gets none.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
    starts, end = [], TOKEN
    for size in sizes:
        starts.append(end)
        end += math.ceil(size / TOKEN) * TOKEN
    file: AnonymousFile | None = None
    memory: Tensor | None = None
    if tensors is not None:
        file = AnonymousFile(end)
        memory = map_offered(file.offer)
        assert memory is not None, "this process made it"
        for tensor, start, size in zip(tensors, starts, sizes, strict=True):
            part = memory[start : start + size].view(tensor.dtype)
            part.copy_(tensor.contiguous().view(-1))
    offers: list[FileOffer | None] = _all_gather(file and file.offer, group)
    if source is not None:
        memory = map_offered(offers[source])
        if memory is None:
            raise RuntimeError(
                f"rank {source} offers memory that cannot be mapped: {offers[source]}"
            )
    dist.barrier(group)  # all have mapped it
    if file is not None:
        file.close()
    if memory is None:
        return []
    return [
        memory[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, like, strict=True)
    ]
