"""Memory of a rank for the exchange of keys and values in context parallelism.

    python benchmarks/context_gather.py [--length 512] [--ranks 2 4 8] [--timed 4096] [--out FILE]

Runs a forward and a backward pass of ``PackedAttention`` on one sequence that is split over gloo
ranks, which gather keys and values (``all_gather``) or send them around (``p2p``). The result is
the peak of allocated bytes without the rank's own queries, keys and values, in units of the keys
and values of the complete sequence (length x (key + value width) of all groups);
docs/measurements.md has these numbers. Allocations are counted, so that the numbers do not
depend on the machine. There is one query head per group, because queries and outputs are local and
matter less with more ranks. The sequence is short and the groups are many, because masks and scores
exist on the CPU only and would otherwise dominate.

Both exchanges are also timed in alternation, on two ranks and a longer sequence (``--timed``): the
result is the median over the turns of the ring's time divided by gathering's.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_step import start
from record import parser, record
from torch.profiler import ProfilerActivity, profile

GROUPS = 8
WIDTHS = {"grouped": (128, 128), "latent": (192, 128)}
"""Widths of a key and of a value: grouped-query heads, and MLA of Moonlight's sizes."""


EXCHANGES = ("all_gather", "p2p")
TURNS = 5


def build_attention(world: int, exchange: str):
    """Only the core attention, on one context-parallel group of all ranks."""
    from transformers import Qwen2Config

    from mppo.models.attention.core import PackedAttention
    from mppo.models.configuration import transformer_config
    from mppo.models.families.architectures import family_config
    from mppo.recipe.sections.megatron import MegatronConfig

    megatron = MegatronConfig(context_parallel_size=world)
    family = family_config(Qwen2Config())
    config = transformer_config(family, megatron, megatron.layout(world), torch.float32)
    groups = SimpleNamespace(cp=dist.group.WORLD)
    return PackedAttention(config, 1, cp_comm_type=exchange, pg_collection=groups)


def make_pass(rank: int, world: int, name: str, exchange: str, length: int):
    """A forward and backward pass of this rank's part of a sequence."""
    from mppo.models.attention.context import ContextPlace, split_context
    from mppo.models.attention.packed_sequences import pack_context

    key, value = WIDTHS[name]
    attention = build_attention(world, exchange)
    packing = pack_context(split_context([length], ContextPlace(world, rank), 1))
    tokens = len(packing.positions)
    qkv = [torch.randn(tokens, 1, GROUPS, width, requires_grad=True) for width in (key, key, value)]

    def run() -> None:
        for x in qkv:
            x.grad = None
        attention(*qkv, None, packed_seq_params=packing).sum().backward()

    run()
    return run


def measure(rank: int, world: int, name: str, exchange: str, length: int, folder: Path) -> None:
    """Peak of a rank, written to ``<folder>/<rank>``."""
    start(rank, world, folder / "store")
    run = make_pass(rank, world, name, exchange, length)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = max(itertools.accumulate(change for _, change in changes))
    (folder / str(rank)).write_text(str(most))
    dist.destroy_process_group()


def take_turns(rank: int, world: int, name: str, length: int, folder: Path) -> None:
    """The first rank writes the ring's share of gathering's time to ``<folder>/ratio``."""
    start(rank, world, folder / "store")
    runs = [make_pass(rank, world, name, exchange, length) for exchange in EXCHANGES]
    ratios = []
    for _ in range(TURNS):
        seconds = []
        for run in runs:
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[1] / seconds[0])
    if rank == 0:
        (folder / "ratio").write_text(str(statistics.median(ratios)))
    dist.destroy_process_group()


def ring_over_gather(name: str, world: int, length: int) -> float:
    """The ring's time over gathering's."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        arguments = (world, name, length, folder)
        mp.start_processes(take_turns, arguments, nprocs=world, start_method="fork")
        return round(float((folder / "ratio").read_text()), 2)


def peak(name: str, world: int, exchange: str, length: int) -> float:
    """The peak of the rank with the highest; ranks are forked after the imports."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        arguments = (world, name, exchange, length, folder)
        mp.start_processes(measure, arguments, nprocs=world, start_method="fork")
        most = max(int((folder / str(rank)).read_text()) for rank in range(world))
    return round(most / (4 * length * GROUPS * sum(WIDTHS[name])), 2)


def main() -> None:
    """Measure every shape on every number of ranks."""
    arguments = parser(__doc__)
    arguments.add_argument("--length", type=int, default=512, help="tokens of the sequence")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    arguments.add_argument("--timed", type=int, default=4096, help="tokens of the timed sequence")
    options = arguments.parse_args()
    from mppo.parallel import device

    device.prepare_megatron()
    import mppo.models.role  # noqa: F401

    found = {
        f"{name} CP{world}": {
            exchange: peak(name, world, exchange, options.length) for exchange in EXCHANGES
        }
        for name in WIDTHS
        for world in options.ranks
    }
    result = {
        "length": options.length,
        "groups": GROUPS,
        "peak_over_whole": found,
        "timed_length": options.timed,
        "ring_time_over_gather_CP2": {
            name: ring_over_gather(name, 2, options.timed) for name in WIDTHS
        },
    }
    record(result, options.out)


if __name__ == "__main__":
    main()
