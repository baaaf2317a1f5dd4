"""Seconds per weight update of the sending side, beside this machine's memory copy.

    python benchmarks/weight_sync.py [--model dense|moe] [--route tensor|disk] [--out FILE]

The stream is a list of tensors in memory (dense: 0.5 GB; moe: 4,000+ expert tensors). What is timed
is mppo's own part: laying a bucket out in shared memory and making the handle a server gets
(``tensor``), or writing the folder (``disk``). A reader in another process opens every handle and
reads the bytes it names, as a server would before its own loading (not part of this).
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import psutil
import torch
import torch.multiprocessing

from mppo.rollout.buckets import SharedBuffer
from mppo.rollout.engine import WeightBucket
from mppo.rollout.sync import DiskRoute

ALIGN = 16


def dense() -> list[tuple[str, tuple[int, ...]]]:
    """A 0.25B-parameter dense model, 0.5 GB in bfloat16."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (32000, 1024)), ("head", (32000, 1024))]
    for layer in range(16):
        shapes += [(f"{layer}.{name}", (1024, 1024)) for name in ("q", "k", "v", "o")]
        shapes += [(f"{layer}.{name}", (2816, 1024)) for name in ("gate", "up", "down")]
        shapes += [(f"{layer}.norm", (1024,))]
    return shapes


def moe() -> list[tuple[str, tuple[int, ...]]]:
    """4,608 expert tensors of a small mixture: 24 layers of 64 experts."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (8000, 256))]
    for layer in range(24):
        shapes.append((f"{layer}.qkv", (768, 256)))
        for expert in range(64):
            shapes += [(f"{layer}.experts.{expert}.{n}", (128, 256)) for n in ("gate", "up")]
            shapes.append((f"{layer}.experts.{expert}.down", (256, 128)))
    return shapes


def buckets_of(
    shapes: list[tuple[str, tuple[int, ...]]], limit: int, scattered: bool
) -> list[WeightBucket]:
    """Buckets of bfloat16 tensors, each the views of one buffer unless ``scattered``."""
    buckets: list[WeightBucket] = []
    group: list[tuple[str, tuple[int, ...]]] = []
    size = 0

    def close() -> None:
        if not group:
            return
        offsets, total = [], 0
        for _, shape in group:
            offsets.append(total)
            total += -(-2 * torch.Size(shape).numel() // ALIGN) * ALIGN
        buffer = torch.ones(total // 2, dtype=torch.bfloat16)
        views = [
            (n, buffer[o // 2 : o // 2 + torch.Size(s).numel()].view(s))
            for o, (n, s) in zip(offsets, group, strict=True)
        ]
        buckets.append([(n, t.clone()) for n, t in views] if scattered else views)

    for name, shape in shapes:
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > limit:
            close()
            group, size = [], 0
        group.append((name, shape))
        size += nbytes
    close()
    return buckets


def _reader(connection) -> None:
    """Open handles and touch what they name, until told to stop."""
    torch.set_num_threads(1)
    while (payload := connection.recv()) is not None:
        content = pickle.loads(base64.b64decode(payload))
        flat = content["flattened_tensor"]
        names = [m.name for m in content["metadata"]]
        connection.send((len(names), int(flat[::4096].long().sum())))
        del content, flat


def memcpy_seconds(nbytes: int) -> tuple[float, float]:
    """Wall-clock and processor seconds of a copy of so many bytes, both sides already touched."""
    size = min(nbytes, 256 << 20)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    wall = processor = float("inf")
    for _ in range(8):
        start, start_processor = time.perf_counter(), time.process_time()
        target.copy_(source)
        wall = min(wall, time.perf_counter() - start)
        processor = min(processor, time.process_time() - start_processor)
    return wall * nbytes / size, processor * nbytes / size


def by_tensor(buckets: list[WeightBucket], repeat: int) -> Iterator[dict[str, float]]:
    """Time of each update through shared memory."""
    parent, child = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_reader, args=(child,))
    reader.start()
    buffers = [SharedBuffer(torch.device("cpu")) for _ in range(2)]
    try:
        for _ in range(repeat):
            own = own_processor = 0.0
            start = time.perf_counter()
            for number, bucket in enumerate(buckets):
                begin, begin_processor = time.perf_counter(), time.process_time()
                buffers[number % 2].fill(bucket)
                payload = buffers[number % 2].payload()
                own += time.perf_counter() - begin
                own_processor += time.process_time() - begin_processor
                parent.send(payload)
                parent.recv()
            yield {
                "seconds": time.perf_counter() - start,
                "own_seconds": own,
                "own_processor_seconds": own_processor,
            }
    finally:
        parent.send(None)
        reader.join()


def by_disk(buckets: list[WeightBucket], repeat: int) -> Iterator[dict[str, float]]:
    """Time of each update written as a folder."""
    with tempfile.TemporaryDirectory() as folder:
        route = DiskRoute(Path(folder) / "weights", Path(folder), writes=True)
        for version in range(repeat):
            start, start_processor = time.perf_counter(), time.process_time()
            route.open({}, version)
            for bucket in buckets:
                route.send(bucket)
            route.close()
            seconds = time.perf_counter() - start
            yield {
                "seconds": seconds,
                "own_seconds": seconds,
                "own_processor_seconds": time.process_time() - start_processor,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--route", choices=("tensor", "disk"), default="tensor")
    parser.add_argument("--bucket-mb", type=int, default=128)
    parser.add_argument("--scattered", action="store_true", help="tensors in storages of their own")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shapes = {"dense": dense, "moe": moe}[arguments.model]()
    buckets = buckets_of(shapes, arguments.bucket_mb << 20, arguments.scattered)
    nbytes = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
    route = {"tensor": by_tensor, "disk": by_disk}[arguments.route]
    resident, times = [], []
    for seconds in route(buckets, arguments.repeat):
        times.append(seconds)
        resident.append(psutil.Process().memory_info().rss)
    copy, copy_processor = memcpy_seconds(nbytes)
    own = min(t["own_seconds"] for t in times)
    own_processor = min(t["own_processor_seconds"] for t in times)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "tensors": len(shapes),
        "buckets": len(buckets),
        "gigabytes": nbytes / 1e9,
        "updates": len(times),
        "seconds": min(t["seconds"] for t in times),
        "own_seconds": own,
        "own_processor_seconds": own_processor,
        "memcpy_seconds": copy,
        "memcpy_processor_seconds": copy_processor,
        "own_gigabytes_per_s": nbytes / own / 1e9,
        "memcpy_gigabytes_per_s": nbytes / copy / 1e9,
        "share_of_memcpy": copy / own,
        "share_of_memcpy_by_processor_time": copy_processor / own_processor,
        # what a copy of the same bytes would take anyway is not counted per tensor
        "own_microseconds_per_tensor": (own - copy) / len(shapes) * 1e6,
        "own_processor_microseconds_per_tensor": (own_processor - copy_processor)
        / len(shapes)
        * 1e6,
        "resident_growth_mb": (resident[-1] - resident[min(2, len(resident) - 1)]) / 1e6,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
