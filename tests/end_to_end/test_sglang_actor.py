"""SGLang's log-probabilities equal those of Megatron's actor, by family, layout, server TP and EP,
mode and route of weight sync, and after ten updates as after one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from forked_server import ADDRESS, forked_server
from ranks import start_ranks
from sglang_case import FAMILIES, TOLERANCE, needs_sglang, own, prompts

pytestmark = [pytest.mark.server, needs_sglang, pytest.mark.usefixtures("forks_servers")]
MODES = ("full", "sliced", "delta")
AGAIN = ("tenth delta", "distributed", "disk")
"""Further updates in a family's last layout."""
TEMPERATURE = 0.7
TP, PP, EP = (
    f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")
)  # fmt: skip
WORLD = {"1": 4, "2": 2}


@dataclass(frozen=True)
class Served:
    """A family with the layouts of its actor, and its servers: how many (two are killed in the
    end), and the groups of their ranks that share the experts out."""

    family: str
    layouts: list[dict[str, int]]
    servers: int = 1
    experts: int = 1

    @property
    def name(self) -> str:
        return self.family if self.experts == 1 else f"{self.family}-EP{self.experts}"


CASES = {
    "1": [
        Served("llama", [{TP: 2}, {PP: 2}, {TP: 2, PP: 2}], servers=2),
        Served("qwen2", [{PP: 2}]),
        Served("qwen3", [{TP: 2}]),
        Served("gemma", [{TP: 2}]),
        Served("qwen2_moe", [{TP: 2, EP: 2}]),
        Served("qwen3_moe", [{EP: 2}, {TP: 2, EP: 2}]),
        Served("deepseek_v3", [{EP: 2}, {PP: 2, EP: 2}]),
    ],
    "2": [
        Served("llama", [{TP: 2}]),
        Served("qwen2", [{PP: 2}]),
        Served("qwen3", [{TP: 2}]),
        Served("qwen2_moe", [{TP: 2, EP: 2}]),
        Served("qwen2_moe", [{EP: 2}], experts=2),
        Served("qwen3_moe", [{PP: 2}]),
        Served("deepseek_v3", [{EP: 2}]),
        Served("deepseek_v3", [{PP: 2}], experts=2),
    ],
}
"""Cases by tensor parallelism of the servers; ``WORLD`` is the number of training ranks."""
EACH = [
    pytest.param(ranks, case, id=f"{ranks}-{case.name}")
    for ranks, cases in CASES.items()
    for case in cases
]


def _engine(
    folder: Path, case: Served, rank: int, world: int, name: str = "own", **options: object
):
    """An engine of this rank for a case's servers."""
    from transformers import AutoConfig

    from mppo.rollout.sglang.sglang_engine import SGLangEngine

    return SGLangEngine(
        folder / case.family,
        AutoConfig.from_pretrained(folder / case.family),
        torch.float32,
        own(**options),
        rank=rank,
        world=world,
        run_dir=folder / "runs" / case.name / name,
        make_server=forked_server,
    )


def _engines(rank: int, folder: Path, ranks: str) -> Iterator[tuple]:
    """The engine of each case; the next one starts while one is used."""
    started = []
    for case in [*CASES[ranks], None]:
        if case:
            engine = _engine(
                folder,
                case,
                rank,
                WORLD[ranks],
                tensor_model_parallel_size=int(ranks),
                expert_parallel_size=case.experts,
                servers=case.servers,
                sync_mode="delta",
                verify_sync="checksum",
            )
            # several buckets even for small models
            engine.slices.request = replace(engine.slices.request, bucket_bytes=1 << 16)
            started.append((case, engine))
        if len(started) > 1 or not case:
            yield started[0]
            started.pop(0)[-1].stop()


def _update(engine, role, mode: str, version: int) -> dict[str, float]:
    """Send new weights as complete tensors, all slices, or changed blocks; the bytes
    moved."""
    from mppo.rollout.engine import WeightSource

    scale(role, 1.1 if version % 2 else 0.9, "self_attention" if mode == "delta" else "")
    pieces = role.weights.slices if mode in ("sliced", "delta") else None
    engine.update_weights(WeightSource(lambda: role.weights.stream(1 << 17), pieces), version)
    return {} if pieces is None else engine.sync_metrics()


def scale(role, factor: float, only: str = "") -> None:
    """Change the parameters whose name contains a word."""
    with torch.no_grad():
        for stage in role.stages:
            for name, parameter in stage.named_parameters():
                if only in name:
                    parameter.mul_(factor)


def _again(engine, role, versions: Iterator[int], connect) -> Iterator[tuple]:
    """Make nine delta updates, then use the other routes to the same servers by their URLs."""
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE

    for _ in range(9):
        moved = _update(engine, role, "delta", next(versions))
    yield "tenth delta", moved, *_gap(engine, role)
    os.environ[API_KEY_VARIABLE] = engine.fleet.key
    urls = tuple(engine.fleet.urls().values())
    for sync in AGAIN[1:]:
        beside = connect(
            sync,
            urls=urls,
            sync=sync,
            server_args={},
            tensor_model_parallel_size=engine.fleet.tensor_parallel,
        )
        _update(beside, role, sync, next(versions))
        yield sync, {}, *_gap(beside, role)
        beside.stop()


def _after_a_kill(engine, role, version: int) -> dict[str, float]:
    """Change a few weights while the server is killed; the bytes of the next update."""
    from mppo.rollout.engine import WeightSource

    for process in engine.fleet.processes.values():
        server = psutil.Process(process.pid).children()[0]
        server.kill()
        server.wait()
    dist.barrier()
    scale(role, 1.1, "layernorm")
    pieces = WeightSource(lambda: role.weights.stream(1 << 17), role.weights.slices)
    engine.update_weights(pieces, version)
    return engine.sync_metrics()


def _modes(layout: dict[str, int], layouts: list[dict[str, int]]) -> tuple[str, ...]:
    """All modes for a family's first layout, one that depends on the layout for others."""
    return MODES if layout == layouts[0] else ("sliced",)


def _gap(engine, role) -> tuple[float, int]:
    """Largest difference over response tokens, and how many there are."""
    from mppo.batch.packing import pack_episodes
    from mppo.batch.shares import bring_episodes
    from mppo.models.streamed_role import forward
    from mppo.parallel.collectives import group_size
    from mppo.recipe.sections.rollout import SamplingConfig
    from mppo.rollout.engine import GenerationRequest

    sampling = SamplingConfig(temperature=TEMPERATURE, n=2)
    found = engine.generate(GenerationRequest(prompts(6), sampling, 8, seed=0))
    everywhere = [range(len(found))] * group_size()
    episodes = list(bring_episodes(found, everywhere).values())
    batch = pack_episodes(episodes)
    plan = role.plan(batch, training=False)
    inside = batch.response_mask_T > 0
    gap = (forward(role, batch, plan).logprobs_T - batch.rollout_logprobs_T)[inside].abs()
    return gap.max().item(), len(gap)


def _first_samples(engine) -> list[list[list[int]]]:
    """Samples of one prompt that each server generates in one batch, before it serves others."""
    from mppo.parallel.collectives import all_gather_objects
    from mppo.rollout.sglang.server_api import MEMORY_TAGS

    engine.fleet.wake(MEMORY_TAGS)
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    mine = [
        [answer.tokens.tolist() for answer in api.generate([[3, 4, 5]] * 16, sampling)]
        for api in engine.fleet.apis.values()
    ]
    return [samples for part in all_gather_objects(mine) for samples in part]


def _role(folder: Path, family: str, layout: dict[str, int], registry, world: int):
    """The actor of a family in a layout."""
    from transformers import AutoConfig

    from mppo.models.role import Role
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    megatron = MegatronConfig(**layout)
    batching = BatchingConfig(ppo_micro_batch_size_per_gpu=5)
    settings = RoleConfig("actor", batching, megatron, "float32", temperature=TEMPERATURE)
    source = folder / family
    config = AutoConfig.from_pretrained(source)
    return Role(settings, source, config, registry.of(megatron.layout(world)))


def _run(rank: int, folder: Path, ranks: str, address: str) -> None:
    os.environ[ADDRESS] = address
    torch.set_num_threads(1)
    world = WORLD[ranks]
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=world)
    registry, gaps, samples = GroupRegistry(), [], []
    try:
        for case, engine in _engines(rank, folder, ranks):
            versions = count()
            for layout in case.layouts:
                role = _role(folder, case.family, layout, registry, world)
                for mode in _modes(layout, case.layouts):
                    moved = _update(engine, role, mode, next(versions))
                    if case.servers > 1 and not samples:
                        samples = _first_samples(engine)
                    gaps.append((case.name, layout, mode, moved, *_gap(engine, role)))
            connect = partial(_engine, folder, case, rank, world)
            again = _again(engine, role, versions, connect)
            gaps += [(case.name, layout, *found) for found in again]
            if case.servers > 1:
                moved = _after_a_kill(engine, role, next(versions))
                samples += _first_samples(engine)
                gaps.append(("killed", None, "delta", moved, *_gap(engine, role)))
        if rank == 0:
            found = {"gaps": gaps, "samples": samples}
            (folder / "found.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found_with(tmp_path_factory) -> Callable[[str], dict[str, list]]:
    """The results with servers of a given number of ranks."""
    import transformers

    found: dict[str, dict[str, list]] = {}

    def of(ranks: str) -> dict[str, list]:
        if ranks not in found:
            folder = tmp_path_factory.mktemp(f"servers_of_{ranks}")
            for family in {case.family for case in CASES[ranks]}:
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
                model.save_pretrained(folder / family)
            start_ranks(_run, (folder, ranks, os.environ[ADDRESS]), WORLD[ranks])
            found[ranks] = json.loads((folder / "found.json").read_text())
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "case"), EACH)
def test_engine_and_actor_agree(found_with, ranks: str, case: Served) -> None:
    found = [gap for gap in found_with(ranks)["gaps"] if gap[0] == case.name]
    layouts = case.layouts
    expected = [[layout, mode] for layout in layouts for mode in _modes(layout, layouts)]
    expected += [[layouts[-1], mode] for mode in AGAIN]
    assert [gap[1:3] for gap in found] == expected
    for _, layout, mode, _, gap, tokens in found:
        assert tokens > 50, (layout, mode)
        assert gap < TOLERANCE, (layout, mode)


@pytest.mark.parametrize(("ranks", "case"), EACH)
def test_slices_are_not_sent_more_often_than_needed(found_with, ranks: str, case: Served) -> None:
    moved: dict[str, list[dict[str, float]]] = {mode: [] for mode in (*MODES, *AGAIN)}
    for _, _, mode, bytes_, *_ in (gap for gap in found_with(ranks)["gaps"] if gap[0] == case.name):
        moved[mode].append({key.rsplit("/", 1)[1]: value for key, value in bytes_.items()})
    share = case.servers / WORLD[ranks]
    for everything in moved["sliced"]:
        assert everything["total"] <= everything["sent"] < 1.02 * everything["total"]
        assert everything["least"] <= everything["crossing"] < 1.02 * everything["least"] + 32
        assert everything["crossing"] < 1.1 * share * everything["gathered"]
    everything = moved["sliced"][0]
    for changed in moved["delta"] + moved["tenth delta"]:
        assert 0 < changed["sent"] < 0.6 * everything["sent"]
    assert moved["delta"][0]["crossing"] <= 0.6 * everything["crossing"]


def test_a_restarted_server_gets_all_weights(found_with) -> None:
    ((*_, moved, gap, tokens),) = (gap for gap in found_with("1")["gaps"] if gap[0] == "killed")
    assert tokens > 50
    assert gap < TOLERANCE
    assert moved["rollout/sync_bytes/sent"] >= moved["rollout/sync_bytes/total"]


def test_servers_never_repeat_each_others_samples_nor_their_own_after_a_restart(found_with) -> None:
    samples = found_with("1")["samples"]
    assert len(samples) == 4, "two servers, started twice"
    assert all(len(tokens) == 8 for each in samples for tokens in each)
    assert len({tuple(tokens) for each in samples for tokens in each}) == 4 * 16
