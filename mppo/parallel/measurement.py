"""Times, traces and snapshots of what this rank's device does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mppo.parallel import device
from mppo.safety.disk import replacing


class StreamTimer:
    """A clock of the current stream; on the CPU, of the process. A wait for the device would also
    wait for messages that other ranks have not sent yet. On CUDA the times are therefore those of
    events on the stream, which are read when all work is done."""

    def __init__(self) -> None:
        device.synchronize()
        self._origin = self._event() if device.is_cuda() else None
        self._began = time.time()

    def mark(self) -> Callable[[], float]:
        """Return a function that returns the time in seconds since 1970 at which the stream reached
        this point; wait for the device before you call it."""
        if self._origin is None:
            now = time.time()
            return lambda: now
        origin, began, event = self._origin, self._began, self._event()
        return lambda: began + origin.elapsed_time(event) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_MOST_EVENTS = 100_000
"""Allocations that a memory snapshot records."""


@contextmanager
def profiling(folder: Path, step: int, rank: int) -> Iterator[None]:
    """Profile what happens inside the context, also if it is left by an exception. Writes
    ``step_N_rank_R.json.gz`` for Perfetto and, on a GPU, ``step_N_rank_R.pickle`` for
    https://pytorch.org/memory_viz."""
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    name, on_gpu = f"step_{step}_rank_{rank}", device.is_cuda()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    profiler = profile(activities=activities, record_shapes=True)
    try:
        with profiler:
            yield
            device.synchronize()
    finally:
        with replacing(folder / f"{name}.json.gz") as building:
            # torch compresses by the name's ending
            plain = building.with_name(f"{building.name}.json.gz")
            profiler.export_chrome_trace(str(plain))
            plain.replace(building)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def probe_ms() -> float:
    """Milliseconds for the product of two matrices on this rank's device, the least of three: a
    fixed piece of arithmetic, by whose duration a slow rank is found."""
    size = 1024 if device.is_cuda() else 192
    matrix = torch.ones(size, size, device=device.device())
    times = []
    for _ in range(3):
        device.synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)
