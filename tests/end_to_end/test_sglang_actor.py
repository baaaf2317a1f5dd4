"""SGLang's log-probabilities equal those of Megatron's actor, by family, layout, server TP and the
mode of weight sync."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang_case import FAMILIES, TOLERANCE, needs_sglang, own, prompts

pytestmark = [pytest.mark.server, needs_sglang]
WORLD = 4
MODES = ("full", "sliced", "delta")
KILLED = "llama"
TEMPERATURE = 0.7
TP, PP, EP = (
    f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")
)  # fmt: skip
CASES = [
    ("llama", 1, [{TP: 2}, {PP: 2}, {TP: 2, PP: 2}]),
    ("qwen3", 2, [{TP: 2}]),
    ("qwen3_moe", 1, [{EP: 2}, {TP: 2, EP: 2}]),
    ("deepseek_v3", 1, [{EP: 2}, {PP: 2, EP: 2}]),
]


def _engines(rank: int, folder: Path) -> Iterator[tuple]:
    """Each case's engine; the next one starts up while this one is used."""
    from transformers import AutoConfig

    from mppo.rollout.sglang import SGLangEngine

    started = []
    for family, server_tp, layouts in [*CASES, (None, 0, [])]:
        if family:
            config = AutoConfig.from_pretrained(folder / family)
            engine = SGLangEngine(
                folder / family,
                config,
                torch.float32,
                own(
                    tensor_model_parallel_size=server_tp,
                    sync_mode="delta",
                    verify_sync="checksum",
                ),
                rank=rank,
                world=WORLD,
                run_dir=folder / "runs" / family,
            )
            # several buckets even of such small models
            engine._slices._request = replace(engine._slices._request, bucket_bytes=1 << 16)
            started.append((family, config, layouts, engine))
        if len(started) > 1 or not family:
            yield started[0]
            started.pop(0)[-1].stop()


def _update(engine, role, mode: str, version: int) -> dict[str, float]:
    """Other weights, by whole tensors, by all their pieces, or by what changed of them; the bytes
    moved."""
    from mppo.rollout.engine import WeightSource

    scale(role, 1.05 + 0.05 * version, "self_attention" if mode == "delta" else "")
    pieces = None if mode == "full" else role.slices
    engine.update_weights(WeightSource(lambda: role.hf_weights(1 << 17), pieces), version)
    return {} if mode == "full" else engine.sync_metrics()


def scale(role, factor: float, only: str = "") -> None:
    """Change the parameters whose name holds a word."""
    with torch.no_grad():
        for stage in role.stages:
            for name, parameter in stage.named_parameters():
                if only in name:
                    parameter.mul_(factor)


def _after_a_kill(engine, role, version: int) -> dict[str, float]:
    """A little changes while the server is killed; the bytes of the next update."""
    from mppo.rollout.engine import WeightSource

    for process in engine._fleet._processes.values():
        server = psutil.Process(process._process.pid).children()[0]
        server.kill()
        server.wait()
    dist.barrier()
    scale(role, 1.1, "layernorm")
    pieces = WeightSource(lambda: role.hf_weights(1 << 17), role.slices)
    engine.update_weights(pieces, version)
    return engine.sync_metrics()


def _modes(layout: dict[str, int], layouts: list[dict[str, int]]) -> tuple[str, ...]:
    """A family's first layout by every mode, the others by that which depends on them most."""
    return MODES if layout == layouts[0] else ("sliced",)


def _gap(engine, role) -> tuple[float, int]:
    """Largest difference over response tokens, and how many there are."""
    from mppo.batch import pack_trajectories
    from mppo.config.schema import SamplingConfig
    from mppo.parallel.schedule import measure_schedule
    from mppo.rollout.engine import Wish

    sampling = SamplingConfig(temperature=TEMPERATURE, n=2)
    trajectories = engine.generate(Wish(prompts(6), sampling, 8, seed=0))
    batch = pack_trajectories(trajectories, [0.0] * len(trajectories))
    shapes = [role.shape(measuring=True)]
    (plan,) = (s.microbatches for s in measure_schedule(batch.lengths_B.tolist(), shapes))
    inside = batch.response_mask_T > 0
    gap = (role.measure(batch, plan)[0] - batch.rollout_logprobs_T)[inside].abs()
    return gap.max().item(), len(gap)


def _run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.config.schema import BatchingConfig, MegatronConfig
    from mppo.models.role import Role, RoleSpec
    from mppo.parallel.groups import GroupRegistry

    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    registry, gaps = GroupRegistry(), []
    try:
        for family, config, layouts, engine in _engines(rank, folder):
            versions = count()
            for layout in layouts:
                megatron = MegatronConfig(**layout)
                spec = RoleSpec(
                    name="actor",
                    head="policy",
                    folder=folder / family,
                    dtype=torch.float32,
                    megatron=megatron,
                    batching=BatchingConfig(ppo_micro_batch_size_per_gpu=5),
                    temperature=TEMPERATURE,
                )
                role = Role(spec, config, registry.of(megatron.layout(WORLD)))
                for mode in _modes(layout, layouts):
                    moved = _update(engine, role, mode, next(versions))
                    gaps.append((family, layout, mode, moved, *_gap(engine, role)))
            if family == KILLED:
                moved = _after_a_kill(engine, role, next(versions))
                gaps.append(("killed", None, "delta", moved, *_gap(engine, role)))
        if rank == 0:
            (folder / "gaps.json").write_text(json.dumps(gaps))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def gaps(tmp_path_factory) -> list:
    import transformers

    folder = tmp_path_factory.mktemp("families")
    for family, _, _ in CASES:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        model.save_pretrained(folder / family)
    mp.spawn(_run, (folder,), nprocs=WORLD)
    return json.loads((folder / "gaps.json").read_text())


@pytest.mark.parametrize("family", [case[0] for case in CASES])
def test_engine_and_actor_agree(gaps, family: str) -> None:
    found = [gap for gap in gaps if gap[0] == family]
    layouts = next(c[2] for c in CASES if c[0] == family)
    wanted = [[layout, mode] for layout in layouts for mode in _modes(layout, layouts)]
    assert [gap[1:3] for gap in found] == wanted
    for _, layout, mode, _, gap, tokens in found:
        assert tokens > 50, (layout, mode)
        assert gap < TOLERANCE, (layout, mode)


@pytest.mark.parametrize("family", [case[0] for case in CASES])
def test_pieces_move_no_more_than_they_must(gaps, family: str) -> None:
    moved: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _, _, mode, bytes_, *_ in (gap for gap in gaps if gap[0] == family):
        moved[mode].append({key.rsplit("/", 1)[1]: value for key, value in bytes_.items()})
    for everything in moved["sliced"]:
        assert everything["total"] <= everything["sent"] < 1.02 * everything["total"]
        assert everything["least"] <= everything["crossing"] < 1.02 * everything["least"] + 32
        assert everything["crossing"] < everything["gathered"] / 2
    everything, (changed,) = moved["sliced"][0], moved["delta"]
    assert 0 < changed["sent"] < 0.6 * everything["sent"]
    assert changed["crossing"] <= 0.6 * everything["crossing"]


def test_a_server_that_was_killed_is_sent_everything(gaps) -> None:
    ((*_, moved, gap, tokens),) = (gap for gap in gaps if gap[0] == "killed")
    assert tokens > 50
    assert gap < TOLERANCE
    assert moved["rollout/sync_bytes/sent"] >= moved["rollout/sync_bytes/total"]
