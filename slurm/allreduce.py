"""All-reduce over all ranks of a job, the last check before a run. Prints time and bandwidth."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from mppo.parallel import device
from mppo.parallel.launch import discover
from mppo.parallel.process_group import process_group

MEGABYTES = 16
REPEATS = 5


def main() -> None:
    """All-reduce; the sum must be the sum of the ranks."""
    info = discover()
    started = time.perf_counter()
    with process_group(info, timeout_s=float(os.environ.get("MPPO_PREFLIGHT_S", "60"))):
        joined = time.perf_counter() - started
        values = torch.full((MEGABYTES << 18,), float(info.rank), device=device.device())
        dist.all_reduce(values)
        wanted = info.world_size * (info.world_size - 1) / 2
        if values[0].item() != wanted or values[-1].item() != wanted:
            raise SystemExit(f"rank {info.rank}: all-reduce gave {values[0]}, not {wanted}")
        device.synchronize()
        started = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(values)
        device.synchronize()
        seconds = (time.perf_counter() - started) / REPEATS
        if info.rank == 0:
            print(
                f"preflight: {info.world_size} ranks ({info.how}, {device.backend()}) joined in "
                f"{joined:.1f} s; all-reduce of {MEGABYTES} MB in {seconds * 1e3:.1f} ms "
                f"({MEGABYTES / 1e3 / seconds:.2f} GB/s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
