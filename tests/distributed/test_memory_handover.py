"""Trainer and servers on the same GPUs take turns: who holds which memory, and in which order.

The memory is that of a ledger (``ledger_server``); engine, HTTP and processes are real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers
from ledger_server import Ledger
from ranks import start_ranks

from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

GPU, RESIDENT, BUILD, ACTIVATIONS, STREAM = 80.0, 45.0, 20.0, 30.0, 5.0
"""GiB: of a GPU; that the trainer keeps; and that its allocator holds after building the models,
training, and sending weights."""
KV_CACHE = 0.9 * (GPU - RESIDENT) - 15.0
SERVER = Path(__file__).parents[1] / "support/ledger_server.py"

START = ["give back", f"start with {KV_CACHE:.1f} GiB of KV cache", "idle"]
ALL, FOR_GENERATION = "weights kv_cache cuda_graph", "kv_cache cuda_graph"
SYNC = ["give back", "resume weights", "load", "load"]
GENERATION = ["give back", f"resume {FOR_GENERATION}", "generate"]


class Trainer:
    """A training rank's memory on its GPU, and its engine."""

    def __init__(self, folder: Path, rank: int, world: int, late_s: float) -> None:
        self.ledger, self._rank, self._late_s = Ledger(folder / "ledger.json"), rank, late_s
        self._version = 0
        self._hold("models", RESIDENT)
        self._hold("cache", BUILD)
        self.engine = SGLangEngine(
            folder,
            transformers.Qwen2Config(num_hidden_layers=1),
            torch.float32,
            RolloutConfig(name="sglang", tensor_model_parallel_size=world, start_timeout_s=120.0),
            rank=rank,
            world=world,
            run_dir=folder,
            make_server=partial(ledger_process, folder / "ledger.json", world),
            give_back=self._give_back,
        )

    def _hold(self, what: str, gib: float) -> None:
        self.ledger.hold(self._rank, f"trainer's {what}", gib)

    def _give_back(self) -> None:
        time.sleep(self._late_s * self._rank)
        self._hold("cache", 0.0)
        if not self._rank:
            self.ledger.note("give back")

    def train(self) -> None:
        self._hold("cache", ACTIVATIONS)

    def sync(self) -> None:
        self._version += 1
        self.engine.update_weights(WeightSource(self._stream), self._version)

    def _stream(self) -> Iterator[WeightBucket]:
        for name in ("first", "second"):
            self._hold("cache", STREAM)
            yield WeightBucket.pack([(name, torch.ones(4))])

    def generate(self) -> None:
        prompts = [Prompt(0, (3, 4), "t", "", "")]
        episodes = self.engine.generate(GenerationRequest(prompts, SamplingConfig(), 4, seed=0))
        assert [each.parts for each in episodes] == [((self._version, 2),)]
        assert all(each.here.ids.tolist() == [5, 2] for each in episodes if each.tokens is not None)


def ledger_process(
    ledger: Path, gpus: int, index: int, *, environment: Mapping[str, str], api_key: str,
    folder: Path, start_timeout_s: float, **others: Any,
) -> ServerProcess:  # fmt: skip
    """As ``own_server``, with the test server instead of SGLang; it never broadcasts."""
    assert not others["broadcasts"]
    return ServerProcess(
        name=f"test server {index}",
        command=lambda port: [sys.executable, str(SERVER), str(ledger), str(gpus), str(port)],
        environment=environment,
        log=folder / f"server_{index}.log",
        is_up=lambda port: SGLangApi(f"http://127.0.0.1:{port}", api_key, 5.0).is_up(),
        start_timeout_s=start_timeout_s,
    )


@pytest.fixture
def trainer(tmp_path) -> Iterator[Trainer]:
    Ledger(tmp_path / "ledger.json").create(gpus=1, capacity=GPU)
    trainer = Trainer(tmp_path, rank=0, world=1, late_s=0.0)
    yield trainer
    trainer.engine.stop()


def test_memory_is_handed_over_in_a_fixed_order(trainer):
    assert trainer.ledger.events() == [*START, f"release {ALL}"]
    for _ in range(2):
        trainer.train()
        trainer.sync()
        assert trainer.ledger.events() == SYNC
        trainer.generate()
        assert trainer.ledger.events() == GENERATION
        trainer.engine.sleep()
        *polls, idle, release = trainer.ledger.events()
        assert set(polls) == {"busy"}, "the server held the batch when it was first asked"
        assert (idle, release) == ("idle", f"release {ALL}")


def test_a_server_that_starts_again_gets_the_memory_of_the_first(trainer):
    trainer.sync()
    trainer.generate()
    trainer.ledger.events()
    guard = psutil.Process(trainer.engine.fleet.processes[0].pid)
    (server,) = guard.children()
    server.kill()
    guard.wait(timeout=60)
    trainer.train()
    trainer.generate()
    release = f"release {FOR_GENERATION}"
    loads = ["give back", "load", "load"]
    assert trainer.ledger.events() == [*START, release, *loads, *GENERATION]


def test_validation_between_generation_needs_no_new_order(trainer):
    trainer.sync()
    trainer.generate()
    trainer.ledger.events()
    trainer.generate()
    assert trainer.ledger.events() == ["give back", "generate"]


def _worker(rank: int, world: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    trainer = Trainer(folder, rank, world, late_s=0.7)
    try:
        for _ in range(2):
            trainer.train()
            trainer.sync()
            trainer.generate()
            trainer.engine.sleep()
        trainer.train()
    finally:
        trainer.engine.stop()
        dist.destroy_process_group()


def test_no_rank_is_ahead_of_another(tmp_path):
    """The second rank gives back late; it trains while the first rank's server releases memory."""
    ledger = Ledger(tmp_path / "ledger.json").create(gpus=2, capacity=GPU)
    start_ranks(_worker, (2, tmp_path), 2)
    turn = [*SYNC, *GENERATION]
    events = [event for event in ledger.events() if event != "busy"]
    asleep = ["idle", f"release {ALL}"]
    assert events == [*START[:2], *asleep, *turn, *asleep, *turn, *asleep]
