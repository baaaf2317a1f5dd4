"""Seconds per weight update on the sending side, relative to this machine's memory copy.

    python benchmarks/weight_sync.py [--model dense|moe] [--layers N] [--route tensor|disk]
        [--out FILE]

The stream is a list of tensors in memory (dense: 0.5 GB in 16 layers; moe: 4,000+ expert tensors in
24). The timed part is mppo's: copying a bucket to shared memory and making the server's handle
(``tensor``), or writing the folder (``disk``). A reader in another process opens every handle and
reads its bytes, as a server does before its own loading, which is not timed.
"""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.multiprocessing
from record import Seconds, parser, record

from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.checked_load import BYTES, TABLE
from mppo.rollout.transport.sync import DiskTransport
from mppo.weights.bucket import BucketLayout, WeightBucket

T = TypeVar("T")


def dense(layers: int = 16) -> list[tuple[str, tuple[int, ...]]]:
    """A 0.25B-parameter dense model, 0.5 GB in bfloat16."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (32000, 1024)), ("head", (32000, 1024))]
    for layer in range(layers):
        shapes += [(f"{layer}.{name}", (1024, 1024)) for name in ("q", "k", "v", "o")]
        shapes += [(f"{layer}.{name}", (2816, 1024)) for name in ("gate", "up", "down")]
        shapes += [(f"{layer}.norm", (1024,))]
    return shapes


def moe(layers: int = 24) -> list[tuple[str, tuple[int, ...]]]:
    """4,608 expert tensors of a small mixture: 24 layers of 64 experts."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (8000, 256))]
    for layer in range(layers):
        shapes.append((f"{layer}.qkv", (768, 256)))
        for expert in range(64):
            shapes += [(f"{layer}.experts.{expert}.{n}", (128, 256)) for n in ("gate", "up")]
            shapes.append((f"{layer}.experts.{expert}.down", (256, 128)))
    return shapes


def buckets_of(shapes: list[tuple[str, tuple[int, ...]]], limit: int) -> list[WeightBucket]:
    """Buckets of bfloat16 tensors."""
    buckets: list[WeightBucket] = []
    group: list[tuple[str, tuple[int, ...]]] = []
    size = 0

    def close() -> None:
        if not group:
            return
        layout = BucketLayout.plan((name, torch.bfloat16, shape) for name, shape in group)
        content = torch.ones(layout.nbytes // 2, dtype=torch.bfloat16).view(torch.uint8)
        buckets.append(WeightBucket(layout, content))

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
    """Open handles and touch their memory until the end marker."""
    torch.set_num_threads(1)
    while (payload := connection.recv()) is not None:
        content = dict(pickle.loads(base64.b64decode(payload)))
        flat = content[BYTES]
        connection.send((len(content[TABLE]), int(flat[::4096].long().sum())))
        del content, flat


@dataclass
class Spent:
    """Wall-clock and processor seconds."""

    wall: float = 0.0
    processor: float = 0.0

    def take(self, work: Callable[[], T]) -> T:
        """Run a piece of work and add its time; its result."""
        start, start_processor = time.perf_counter(), time.process_time()
        result = work()
        self.wall += time.perf_counter() - start
        self.processor += time.process_time() - start_processor
        return result


def memcpy(nbytes: int) -> Spent:
    """A copy of this many bytes between touched buffers."""
    size = min(nbytes, 256 << 20)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = Seconds()
    for _ in range(8):
        seconds.take(lambda: target.copy_(source))
    return Spent(seconds.wall * nbytes / size, seconds.processor * nbytes / size)


@dataclass
class Update:
    """One update: total time, and mppo's own part."""

    seconds: float
    own: Spent


def by_tensor(buckets: list[WeightBucket], repeat: int) -> Iterator[Update]:
    """Updates through shared memory."""
    parent, child = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_reader, args=(child,))
    reader.start()
    buffers = [SharedBuffer(torch.device("cpu")) for _ in range(2)]
    report = Path("nothing")
    try:
        for _ in range(repeat):
            own = Spent()
            start = time.perf_counter()
            for number, bucket in enumerate(buckets):
                buffer = buffers[number % 2]
                own.take(lambda buffer=buffer, bucket=bucket: buffer.fill(bucket))
                payload = own.take(lambda buffer=buffer: buffer.own_payload(report, True, False))
                parent.send(payload)
                parent.recv()
            yield Update(time.perf_counter() - start, own)
    finally:
        parent.send(None)
        reader.join()


def by_disk(buckets: list[WeightBucket], repeat: int) -> Iterator[Update]:
    """Updates written as a folder."""
    with tempfile.TemporaryDirectory() as folder:
        route = DiskTransport(Path(folder) / "weights", Path(folder), writes=True)

        def write(version: int) -> None:
            route.open({}, version)
            for bucket in buckets:
                route.send(bucket)
            route.close()

        for version in range(repeat):
            own = Spent()
            own.take(lambda version=version: write(version))
            yield Update(own.wall, own)


def main() -> None:
    arguments = parser(__doc__, repeat=50)
    arguments.add_argument("--model", choices=("dense", "moe"), default="dense")
    arguments.add_argument("--route", choices=("tensor", "disk"), default="tensor")
    arguments.add_argument("--layers", type=int, help="default: the model's")
    arguments.add_argument("--bucket-mb", type=int, default=128)
    given = arguments.parse_args()
    sizes = {} if given.layers is None else {"layers": given.layers}
    shapes = {"dense": dense, "moe": moe}[given.model](**sizes)
    buckets = buckets_of(shapes, given.bucket_mb << 20)
    nbytes = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
    route = {"tensor": by_tensor, "disk": by_disk}[given.route]
    resident, updates = [], []
    for update in route(buckets, given.repeat):
        updates.append(update)
        resident.append(psutil.Process().memory_info().rss)
    copy = memcpy(nbytes)
    own = Spent(min(u.own.wall for u in updates), min(u.own.processor for u in updates))
    # the time of a copy of the same bytes is not counted per tensor
    per_tensor = 1e6 / len(shapes)
    record(
        {
            "tensors": len(shapes),
            "buckets": len(buckets),
            "gigabytes": nbytes / 1e9,
            "updates": len(updates),
            "seconds": min(u.seconds for u in updates),
            "own_seconds": own.wall,
            "own_processor_seconds": own.processor,
            "memcpy_seconds": copy.wall,
            "memcpy_processor_seconds": copy.processor,
            "own_gigabytes_per_s": nbytes / own.wall / 1e9,
            "memcpy_gigabytes_per_s": nbytes / copy.wall / 1e9,
            "share_of_memcpy": copy.wall / own.wall,
            "share_of_memcpy_by_processor_time": copy.processor / own.processor,
            "own_microseconds_per_tensor": (own.wall - copy.wall) * per_tensor,
            "own_processor_microseconds_per_tensor": (own.processor - copy.processor) * per_tensor,
            "resident_growth_mb": (resident[-1] - resident[min(2, len(resident) - 1)]) / 1e6,
        },
        given.out,
    )


if __name__ == "__main__":
    main()
