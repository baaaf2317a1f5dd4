"""Copies of a device's tensors to host memory and back, beside the computation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; a tensor of any dtype can be viewed at a multiple of it."""
_SLAB = 64 << 20
"""Bytes of host memory that are allocated together."""


@dataclass(eq=False)
class _Slab:
    """Host memory (uint8; pinned for a GPU) that is reused when no copy in it is needed any more;
    ``used`` bytes were handed out since it was last empty."""

    content: Tensor
    used: int = 0
    copies: int = 0


class HostCopy:
    """A tensor in host memory. Its memory is reused when this object is freed."""

    def __init__(self, slab: _Slab, content: Tensor, device: torch.device) -> None:
        self._slab, self.content, self.device = slab, content, device
        slab.copies += 1

    def __del__(self) -> None:
        self._slab.copies -= 1


@dataclass(frozen=True)
class Fetched:
    """A tensor on its way back to the device, valid after ``wait``; ``event`` is its arrival."""

    tensor: Tensor
    event: Any = None

    def wait(self) -> Tensor:
        if self.event is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.event)
        return self.tensor


class HostCopier:
    """Copies tensors of one device to host memory and back, on a stream of its own; on the CPU
    copies complete at once. All copies run in the order of the calls, so a copy may reuse host
    memory whose last copy back is not complete. The host waits for none of them."""

    def __init__(self, device: torch.device, slab_bytes: int = _SLAB) -> None:
        self._on_gpu, self._slab_bytes = device.type != "cpu", slab_bytes
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._slabs: list[_Slab] = []
        self._current: _Slab | None = None

    @property
    def nbytes(self) -> int:
        return sum(len(slab.content) for slab in self._slabs)

    @property
    def copies(self) -> int:
        return sum(slab.copies for slab in self._slabs)

    def store(self, x: Tensor) -> HostCopy:
        """Copy a tensor to host memory; it may be freed at once, but must not be changed."""
        slab = self._slab_for(x.nbytes)
        room = slab.content[slab.used : slab.used + x.nbytes]
        slab.used += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        copy = HostCopy(slab, room.view(x.dtype).view(x.shape), x.device)
        if self._stream is None:
            copy.content.copy_(x)
            return copy
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            copy.content.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its memory is not reused before it is copied
        return copy

    def fetch(self, copy: HostCopy) -> Fetched:
        """Start to copy a tensor back to its device, to new memory there."""
        content = copy.content
        tensor = torch.empty(content.shape, dtype=content.dtype, device=copy.device)
        if self._stream is None:
            return Fetched(tensor.copy_(content))
        self._stream.wait_stream(torch.cuda.current_stream(copy.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(content, non_blocking=True)
        tensor.record_stream(self._stream)  # it may be freed before it has arrived
        return Fetched(tensor, self._stream.record_event())

    def _slab_for(self, nbytes: int) -> _Slab:
        current = self._current
        if current is not None:
            current.used = current.used if current.copies else 0
            if len(current.content) - current.used >= nbytes:
                return current
        free = (s for s in self._slabs if not s.copies and len(s.content) >= nbytes)
        slab = min(free, key=lambda s: len(s.content), default=None)
        if slab is None:
            size = -(-nbytes // self._slab_bytes) * self._slab_bytes
            slab = _Slab(torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu))
            self._slabs.append(slab)
        slab.used, self._current = 0, slab
        return slab


@functools.cache
def host_copier(device: torch.device) -> HostCopier:
    return HostCopier(device)
