"""What CUDA's hardware queues and the calls of a host wait for, measured on one GPU.

    CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_MODULE_LOADING=EAGER python tests/gpu/cuda_rules.py

prints one line of JSON. A stream is kept busy by a kernel that does nothing for ``BUSY_S``; what
ends much earlier did not wait for it. The rules of ``mppo.pipeline.deadlock`` rest on this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from mppo.parallel import device

BUSY_S = 0.6
POOL = 32
"""Streams that torch has of one priority; process groups take theirs from these."""


class Rules:
    """Measures on the current device."""

    def __init__(self) -> None:
        self._one = torch.zeros(1, device=device.device())
        streams = [torch.cuda.Stream(priority=high) for high in (0, -1) for _ in range(POOL)]
        self._streams = list({stream.cuda_stream: stream for stream in streams}.values())
        for stream in self._streams:
            self._marked(stream)
        torch.cuda.synchronize()
        cycles = 10_000_000
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        self._cycles = int(cycles * BUSY_S / (time.perf_counter() - begin))

    def _busy(self, stream: torch.cuda.Stream) -> float:
        """Keep a stream busy from now on; returns the time."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self._cycles)
        return begin

    def _marked(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A small kernel on a stream, and the event of its end."""
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._one.add(1)
            event.record()
        return event

    def _ended(self, events: list[torch.cuda.Event], begin: float) -> list[bool]:
        """Which of the events happen while the stream is surely still busy."""
        while time.perf_counter() - begin < BUSY_S / 2:
            time.sleep(0.001)
        return [event.query() for event in events]

    def other_streams(self, queued_behind: bool, waiting: bool = False) -> list[int]:
        """Streams, by number, that do not start an operation while the first one is busy.

        Args:
            queued_behind: whether a second operation waits behind the busy one, on its stream.
            waiting: whether the second one waits on a stream of its own, for an event.
        """
        first, *others = self._streams
        begin = self._busy(first)
        if waiting:
            event = torch.cuda.Event()
            event.record(first)
            first, *others = others
            first.wait_event(event)
        if queued_behind or waiting:
            self._marked(first)
        ended = self._ended([self._marked(stream) for stream in others], begin)
        return [number for number, done in enumerate(ended, 1) if not done]

    def waits(self, call: Callable[[], Any]) -> bool | str:
        """Whether a call of the host, on another stream, returns only when the busy one ends."""
        begin = self._busy(self._streams[0])
        ended = torch.cuda.Event()
        ended.record(self._streams[0])
        with torch.cuda.stream(self._streams[1]):
            kept = call()
        waited, seconds = ended.query(), time.perf_counter() - begin
        torch.cuda.synchronize()
        del kept
        return f"unknown: it took {seconds:.1f} s" if seconds > 1.5 * BUSY_S else waited


def _calls() -> dict[str, Callable[[], Any]]:
    """Calls of a host, by name."""
    place = device.device()
    on_device = torch.zeros(1 << 20, device=place)
    pageable = torch.zeros(1 << 20)
    pinned = torch.zeros(1 << 20).pin_memory()
    mib = 1 << 20

    def unused() -> None:
        torch.empty(512 * mib, dtype=torch.uint8, device=place)

    return {
        "kernel of a loaded module": lambda: on_device.add(1),
        "first kernel of sort": lambda: on_device.sort(),
        "first product of matrices": lambda: on_device.view(1024, 1024) @ on_device.view(1024, -1),
        "first product in bfloat16": lambda: (half := on_device.view(1024, 1024).bfloat16()) @ half,
        "copy to pinned memory": lambda: pinned.copy_(on_device, non_blocking=True),
        "copy from pinned memory": lambda: on_device.copy_(pinned, non_blocking=True),
        "copy to pageable memory": lambda: pageable.copy_(on_device),
        "copy from pageable memory": lambda: on_device.copy_(pageable),
        "item": lambda: on_device[0].item(),
        "allocate 512 MiB from the driver": lambda: unused(),
        "free unused memory": lambda: torch.cuda.empty_cache(),
        "pin by the allocator": lambda: torch.empty(64 * mib, dtype=torch.uint8, pin_memory=True),
        "pin pages": lambda: device.pinned_memory(64 * mib),
        "ask for free memory": lambda: torch.cuda.mem_get_info(),
        "create an event and record it": lambda: torch.cuda.Event(enable_timing=True).record(),
        "export a handle": lambda: on_device.untyped_storage()._share_cuda_(),
        "wait for the own stream": lambda: torch.cuda.current_stream().synchronize(),
        "wait for the device": lambda: torch.cuda.synchronize(),
    }


def measured() -> dict[str, Any]:
    """All that this process can find out."""
    rules = Rules()
    found: dict[str, Any] = {
        "busy alone": rules.other_streams(False),
        "busy, one behind it": rules.other_streams(True),
        "busy, one on a stream that waits for it": rules.other_streams(False, waiting=True),
    }
    calls: dict[str, Any] = {}
    for name, call in _calls().items():
        try:
            calls[name] = rules.waits(call)
        except Exception as error:  # of one call, such as a handle of an expandable segment
            calls[name] = f"{type(error).__name__}: {error}"[:200]
    found["waits"] = calls
    return found


if __name__ == "__main__":
    device.select(0, 1)
    print(json.dumps(measured()))
