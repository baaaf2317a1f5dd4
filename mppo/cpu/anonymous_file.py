"""Memory that processes of one machine share without a name in any file system.

The file exists as long as a process has it open or mapped: whatever kills the processes, nothing is
left behind.
"""

from __future__ import annotations

import os
import platform
import secrets
from typing import NamedTuple

import torch
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


def can_offer() -> bool:
    """Whether this system has such files."""
    return hasattr(os, "memfd_create")


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
