"""Checkpoints: blocking time of an asynchronous save, write rate relative to the disk, load rates.

``python benchmarks/checkpoint.py --hidden 768 --layers 8`` runs two ranks (TP2). They save a model
with its optimizer (16 bytes per parameter with bfloat16, 12 with float32) synchronously and
asynchronously, copy the same bytes on the same disk, and load them with TP2 and with PP2.

An asynchronous save blocks training at its start, and again before the next update if the models
are not yet copied. A forward pass runs between these two points; the result contains its slowdown
by the writing threads, which compete with it for cores. The result is printed, and written with
``--out``. Loads read from the page cache, and the order of the layouts alternates. Each ratio is
the median over the turns.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import parser, record

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


def make_model(folder: Path, vocabulary: int, hidden: int, layers: int) -> int:
    """Write a random Qwen2 model; its parameter count."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def build(folder: Path, registry, megatron: dict):
    from transformers import AutoConfig

    from mppo.models.role import Role
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.optim import OptimConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    section = MegatronConfig(**megatron)
    settings = RoleConfig("actor", BatchingConfig(), section, "float32", optim=OptimConfig())
    groups = registry.of(section.layout(dist.get_world_size()))
    return Role(settings, folder, AutoConfig.from_pretrained(folder), groups, total_steps=10)


def checkpointer(role, root: Path, background: bool):
    from mppo.checkpoint.checkpointer import Checkpointer
    from mppo.recipe.sections.trainer import TrainerConfig
    from mppo.supervision.stop_request import StopRequest

    trainer = TrainerConfig(async_save=background)
    return Checkpointer(trainer, root, {"actor": role}, {}, {}, StopRequest(), lambda text: None)


def timed(action) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def timed_and_busy(action) -> tuple[float, float]:
    """Wall-clock seconds, and processor seconds of the busiest rank."""
    start = time.process_time()
    seconds = timed(action)
    busy = torch.tensor(time.process_time() - start)
    dist.all_reduce(busy, op=dist.ReduceOp.MAX)
    return seconds, busy.item()


def worker(rank: int, root: Path, repeat: int, tokens: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.checkpoint.role_state import load_role
    from mppo.parallel import device
    from mppo.parallel.groups import GroupRegistry

    device.prepare_megatron()
    dist.init_process_group("gloo", f"file://{root}/store", rank=rank, world_size=2)
    registry = GroupRegistry()
    role = build(root / "model", registry, TP2)
    background = checkpointer(role, root / "unused", background=True)
    between = measuring(role, tokens)
    seconds: dict[str, list[float]] = {}
    for turn in range(repeat + 1):
        target = root / f"turn_{turn}"
        saver = checkpointer(role, target / "sync", background=False)
        found = {"synchronous save": timed(lambda: saver.save(1, {}))}  # noqa: B023
        background.root = target / "async"
        found["measuring pass"] = timed(between)
        blocked = timed(lambda: background.save(1, {}))
        found["measuring pass beside a save"] = timed(between)
        blocked += timed(background.before_update)
        found["blocked by an asynchronous save"] = blocked
        background.finish()
        found["copy of the same bytes"] = copy_time(target / "sync", target / "copy")
        counters = {"optimizer_step": 0, "schedule_step": 0}
        folder = target / "sync/global_step_1/actor"
        for name, layout in by_turns([("same", TP2), ("other", PP2)], turn):
            fresh = build(root / "model", registry, layout)
            read_files(folder)
            load = partial(load_role, fresh, folder, counters)
            found[f"load, {name} layout"], busy = timed_and_busy(load)
            found[f"processor in a load, {name} layout"] = busy
            del load
            del fresh
            gc.collect()  # otherwise the next model would be in newly allocated memory
        if rank == 0:
            shutil.rmtree(target)
        dist.barrier()
        for name, value in found.items() if turn else ():
            seconds.setdefault(name, []).append(value)
    if rank == 0:
        (root / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def by_turns(cases: list, turn: int) -> list:
    """The cases, starting with another one in each turn: the first finds memory unused."""
    return cases[turn % len(cases) :] + cases[: turn % len(cases)]


def read_files(folder: Path) -> None:
    """Read files into the page cache, which may have dropped some of them since the save."""
    if dist.get_rank() == 0:
        for file in folder.iterdir():
            file.read_bytes()


def measuring(role, tokens: int) -> Callable[[], object]:
    """A forward pass of the role over sequences of 128 random tokens."""
    from mppo.batch.episode import Episode, EpisodeTokens
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.models.streamed_role import forward

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(
        0, role.hf_config.vocab_size, (tokens // 128, 128), generator=generator
    ).tolist()
    episodes = [
        Episode.sampled(
            Prompt(i, row[:64], "", "", ""), EpisodeTokens(row[64:], [0.0] * 64), "stop", 0
        )
        for i, row in enumerate(rows)
    ]
    batch = pack_episodes(episodes)
    plan = role.plan(batch, training=False)
    return lambda: forward(role, batch, plan)


def copy_time(source: Path, target: Path) -> float:
    """Seconds for one process to copy a folder and flush it to disk; every rank waits."""

    def copy() -> None:
        if dist.get_rank():
            return
        for file in sorted(p for p in source.rglob("*") if p.is_file()):
            to = target / file.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as reader, to.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 16 << 20)
                writer.flush()
                os.fsync(writer.fileno())

    return timed(copy)


def over(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Median over the turns of the ratio of two times."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def main() -> int:
    options = parser(__doc__, repeat=4)
    options.add_argument("--hidden", type=int, default=768)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--vocabulary", type=int, default=32_000)
    options.add_argument("--tokens", type=int, default=2048, help="of the forward pass")
    options.add_argument("--folder", type=Path, help="on the disk to measure")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder).resolve()  # part of an address below
        sizes = (arguments.vocabulary, arguments.hidden, arguments.layers)
        parameters = make_model(root / "model", *sizes)
        mp.spawn(worker, (root, arguments.repeat, arguments.tokens), nprocs=2)
        seconds = json.loads((root / "seconds.json").read_text())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    gigabytes = 12 * parameters / 1e9
    ratios = {
        "blocking share of an asynchronous save": over(
            seconds, "blocked by an asynchronous save", "synchronous save"
        ),
        "write rate over copy rate": over(seconds, "copy of the same bytes", "synchronous save"),
        "load, other layout over same": over(seconds, "load, other layout", "load, same layout"),
        "processor in a load, other layout over same": over(
            seconds, "processor in a load, other layout", "processor in a load, same layout"
        ),
    }
    measured = {
        "parameters": parameters,
        "checkpoint_gb": round(gigabytes, 3),
        "median_seconds": {name: round(value, 3) for name, value in median.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }
    record(measured, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
