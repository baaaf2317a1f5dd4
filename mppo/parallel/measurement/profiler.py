"""Traces of torch's profiler and snapshots of GPU memory, of one rank during one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mppo.parallel import device
from mppo.safety.disk import replacing

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
