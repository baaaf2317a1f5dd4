"""Storages that leave a device for host memory and come back in place.

A storage keeps its identity while its memory is freed, so that every view of it is valid again when
the memory is back: parameters in a gradient or weight buffer, shards of an optimizer, slots of a
weight stream. Megatron-Core's ``MegatronOptimizer.offload_to_cpu`` replaces tensors instead, which
separates them from their views, and allocates unpinned host memory each time;
``_ParamAndGradBuffer.offload_to_cpu`` copies on the stream of the computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mppo.parallel import device as devices

_ALIGNMENT = 512
"""Bytes; a tensor of any dtype can be viewed at a multiple of it."""


@dataclass(frozen=True)
class _Moved:
    """A storage, empty while its content is in host memory, from byte ``start``."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int


class CopyLane:
    """The stream on which a process copies storages of one device to host memory and back; on the
    CPU copies complete at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type != "cpu" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy pairs of target and source of equal size, after the work queued on the
        current stream; return the event of their completion, None on the CPU."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for x in (target, source):
                    if x.device.type != "cpu":
                        x.record_stream(self.stream)  # its memory is not reused before the copy
            return self.stream.record_event()


@functools.cache
def copy_lane(device: torch.device) -> CopyLane:
    return CopyLane(device)


class MovedStorages:
    """The storages of some tensors, which move to host memory and back together.

    The host memory is allocated with the first move, pinned if the device is a GPU, and reused by
    all later ones. Copies run on a stream of their own: the host waits for none of them.

    ``tensors`` lists the tensors at every move to the host, since a tensor may have another storage
    by then; tensors on other devices stay. ``changed``: the content may differ from that in host
    memory. Whoever writes to the tensors on the device sets it; a move of unchanged content copies
    nothing.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._lane = copy_lane(device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._moved: dict[int, _Moved] = {}
        self._kept: list[tuple[int, int]] = []
        self._stored: Any = None
        self._arriving: Any = None
        self.changed = True

    @property
    def host_nbytes(self) -> int:
        return self._host.nbytes

    @property
    def is_moved(self) -> bool:
        return bool(self._moved)

    @torch.no_grad()
    def leave(self) -> None:
        """Start to copy the storages to host memory, and free them on the device; MemoryError if
        the host has too little."""
        if self._moved:
            return
        self.wait()
        places, end = [], 0
        for storage in _storages(self._tensors(), self._device):
            places.append(_Moved(storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        layout = [(place.storage._cdata, place.nbytes) for place in places]
        if end > self._host.nbytes:
            devices.synchronize()  # copies from and to the old host memory may be under way
            self._host = devices.pinned_memory(end)
        if self.changed or layout != self._kept:
            pairs = [(self._content(place), _octets(place, self._device)) for place in places]
            self._stored = self._lane.copy(pairs)
        for place in places:
            place.storage.resize_(0)
        self._moved = {place.storage._cdata: place for place in places}
        self._kept, self.changed = layout, False

    @torch.no_grad()
    def arrive(self) -> None:
        """Allocate the storages on the device, start to copy back; ``wait`` before their use."""
        if not self._moved:
            return
        places = list(self._moved.values())
        for place in places:
            place.storage.resize_(place.nbytes)
        self._arriving = self._lane.copy(
            [(_octets(place, self._device), self._content(place)) for place in places]
        )
        self._moved = {}

    def wait(self) -> None:
        """Make the current stream wait until the storages are back on the device."""
        if self._arriving is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arriving)
            self._arriving = None

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor where its content is: itself, or a view of the host memory. The view is valid
        until the storages leave the device again. The host waits for a copy to the host that is
        under way, the current stream for one to the device."""
        self.wait()
        place = self._moved.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        if self._stored is not None:
            self._stored.synchronize()
        content = self._host[: self._host.nbytes // tensor.itemsize * tensor.itemsize]
        offset = place.start // tensor.itemsize + int(tensor.storage_offset())
        return content.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), offset)

    def _content(self, place: _Moved) -> Tensor:
        return self._host[place.start : place.start + place.nbytes]


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages on the device, each once, in the order of the tensors; empty ones left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage._cdata, storage)
    return list(found.values())


def _octets(place: _Moved, device: torch.device) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=device)  # set_'s annotations differ
    return empty.set_(place.storage, 0, (place.nbytes,))
