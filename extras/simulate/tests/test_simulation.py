"""The parts of the simulation that need no simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mppo_simulate.__main__ import main
from mppo_simulate.case import RankCase
from mppo_simulate.gpu.counters import Collective, Wait
from mppo_simulate.gpu.ledger import Allocation, Ledger
from mppo_simulate.gpu.te_stand_in import VERSION
from mppo_simulate.inputs import longest_batch
from mppo_simulate.moments import simulated_moments
from mppo_simulate.program import simulate_stages
from mppo_simulate.quick import (
    Depths,
    chunk_depths,
    extrapolated,
    reduced_batch,
    scale_micro_batches,
    with_layers,
)
from mppo_simulate.rank import PhaseResult, RankResult
from mppo_simulate.timeline import write_memory_trace

from mppo.hub.model_config import ModelConfigs
from mppo.planning.outside import ENGINE_GRAPHS, colocated_engine
from mppo.planning.verdict import Verdict, judge
from mppo.recipe.gpu_types import GIB, GPU_TYPES, find_gpu
from mppo.recipe.load import load_recipe
from mppo.recipe.model_shape import model_shape
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[3]


def case_of(name: str, rank: int = 0, *overrides: str) -> RankCase:
    path = ROOT / "recipes" / f"{name}.yaml"
    configs = ModelConfigs(path)
    recipe = load_checked(path, overrides, None, configs.read, files=False)
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    world = recipe.trainer.nnodes * recipe.trainer.n_gpus_per_node
    return RankCase(recipe, hf_configs, world, rank, 1, GPU_TYPES["h100-80gb"])


def result_of(peak: int, resident: int, layers: int = 1) -> RankResult:
    phase = PhaseResult(
        name="updating actor",
        peak=peak,
        composition=Counter({"actor weights": resident, "updating actor": peak - resident}),
        operations=10 * layers,
        micro_batches=4,
        waits=Counter({Wait("a.py:1", "item"): 4 * layers}),
    )
    return RankResult(
        0, {}, [phase], Counter({"actor weights": resident}), Counter({"actor weights": resident}),
        2, Counter(), Counter(), 1.0,
    )  # fmt: skip


def test_the_ledger_counts_what_lives_and_keeps_the_largest_moment():
    phase = ["one"]
    ledger = Ledger(lambda: phase[0])
    kept = torch.empty(1 << 20, dtype=torch.uint8)
    ledger.note(kept)
    freed = torch.empty(3 << 20, dtype=torch.uint8)
    ledger.note(freed)
    ledger.note(freed[5:])  # a view: the same storage
    assert ledger.now == 4 << 20
    del freed
    assert ledger.now == 1 << 20
    phase[0] = "two"
    ledger.note(torch.empty(100, dtype=torch.uint8))
    assert ledger.now == 1 << 20
    assert ledger.peaks["one"].size == 4 << 20
    assert ledger.peaks["two"].size == (1 << 20) + 512
    assert "test_simulation.py:" in ledger.peaks["one"].line
    assert ledger.composition(ledger.peaks["one"].moment) == {"one": 4 << 20}
    assert ledger.composition() == {"one": 1 << 20}


def test_the_ledger_follows_a_storage_that_is_resized():
    ledger = Ledger(lambda: "one")
    x = torch.empty(1 << 20, dtype=torch.uint8)
    address = ledger.note(x).address
    x.untyped_storage().resize_(0)
    ledger.note(x)
    assert ledger.now == 0
    x.untyped_storage().resize_(2 << 20)
    assert ledger.note(x).address != address
    assert ledger.now == 2 << 20


def test_a_line_through_two_depths_gives_the_third():
    shallow, deep = result_of(5 * GIB, 3 * GIB, 1), result_of(6 * GIB, 4 * GIB, 2)
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0}))
    assert found.resident.total() == 11 * GIB
    assert found.phases[0].peak == 13 * GIB
    assert found.phases[0].operations == 10 * 9
    assert found.phases[0].waits == {Wait("a.py:1", "item"): 4 * 9}


def test_exchanges_of_gradients_are_counted_once_for_a_mini_batch():
    """As many buckets as micro-batches, or a multiple, look like one exchange for each of them."""
    message = Collective("send", "pipeline", 2)
    buckets = Collective("reduce_scatter_tensor_coalesced", "data parallel", 4)
    result = result_of(5 * GIB, 3 * GIB)
    result.phases[0].calls = Counter({message: 8, buckets: 8})
    result.phases[0].nbytes = Counter({message: 800, buckets: 8 * GIB})
    full, reduced = (
        load_recipe(None, [f"data.train_batch_size={size}", "actor.ppo_mini_batch_size=32"])
        for size in (64, 8)
    )
    (found,) = scale_micro_batches(result, full, reduced).phases
    assert found.calls == {message: 64, buckets: 16}
    assert found.nbytes == {message: 6400, buckets: 16 * GIB}
    assert found.waits == {Wait("a.py:1", "item"): 32}


def test_phases_may_begin_in_another_order_at_another_depth():
    """In a shared pipeline the costs of passes decide whose micro-batch is first."""
    shallow, deep = result_of(5 * GIB, 3 * GIB, 1), result_of(6 * GIB, 4 * GIB, 2)
    shallow.phases.insert(0, replace(shallow.phases[0], name="updating critic", operations=3))
    deep.phases.append(replace(deep.phases[0], name="updating critic", operations=4))
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0, "critic": 10.0}))
    counts = {phase.name: phase.operations for phase in found.phases}
    assert counts == {"updating actor": 10 * 9, "updating critic": 3 + 8}


def test_another_line_may_reach_the_peak_at_another_depth():
    shallow, deep = result_of(10 * GIB, 3 * GIB), result_of(11 * GIB, 3 * GIB)
    for result, steep in ((shallow, 8 * GIB), (deep, 10 * GIB)):
        phase = result.phases[0]
        phase.line = "flat.py:1"
        phase.by_line = {"flat.py:1": phase.composition, "steep.py:2": Counter({"actor x": steep})}
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0})).phases[0]
    assert (found.peak, found.line) == (24 * GIB, "steep.py:2")


def test_memory_only_grows_while_a_role_is_built():
    shallow, deep = result_of(10 * GIB, 3 * GIB), result_of(11 * GIB, 3 * GIB)
    for result, last_but_one in ((shallow, 8 * GIB), (deep, 10 * GIB)):
        phase = result.phases[0] = replace(result.phases[0], name="building actor")
        phase.line = "last.py:2"
        earlier = Counter({"actor x": last_but_one})
        phase.by_line = {"last.py:2": phase.composition, "earlier.py:1": earlier}
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0})).phases[0]
    assert (found.peak, found.line) == (18 * GIB, "last.py:2")


def test_a_weight_sync_grows_with_the_layers_of_the_actor():
    shallow, deep = result_of(10 * GIB, 3 * GIB, 1), result_of(10 * GIB, 3 * GIB, 2)
    for result in (shallow, deep):
        result.phases[0] = replace(result.phases[0], name="weight sync", micro_batches=0)
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0, "critic": 20.0}))
    assert found.phases[0].operations == 10 * 9


def test_no_more_of_a_purpose_than_lives_between_steps():
    shallow, deep = result_of(5 * GIB, 3 * GIB), result_of(8 * GIB, 4 * GIB)
    deep.phases[0].composition = Counter({"actor weights": 6 * GIB, "updating actor": 2 * GIB})
    for result in (shallow, deep):
        result.complete["updating actor"] = 1 << 20  # what a phase leaves bounds no other moment
    found = extrapolated(shallow, deep, Depths(2, 3, {"actor": 10.0}))
    assert found.phases[0].composition["actor weights"] == found.complete["actor weights"]
    assert found.phases[0].composition["updating actor"] == 2 * GIB


@pytest.mark.parametrize(
    ("recipe", "rank", "first", "second", "wanted"),
    [
        ("qwen2_7b_rm", 0, 3, 4, 28),  # a stage with first and last layer has one between them
        ("gemma_2_2b_gsm8k", 0, 4, 6, 26),  # its attention alternates
        ("moonlight_16b_a3b_gsm8k", 0, 2, 3, 14),  # its first layer is dense
        ("moonlight_16b_a3b_gsm8k", 31, 2, 3, 13),
        ("deepseek_v3_671b_gsm8k", 511, None, None, 2),
    ],
)
def test_depths_hold_every_kind_of_layer(recipe, rank, first, second, wanted):
    case = case_of(recipe, rank)
    depths = chunk_depths(case)
    if first is None:
        assert depths is None
        return
    assert (depths.first, depths.second, depths.full["actor"]) == (first, second, wanted)
    shallow = with_layers(case, first)
    layout = case.recipe.roles()[0].megatron.layout(case.world_size)
    assert shallow.hf_configs["actor"].num_hidden_layers == first * layout.pp
    assert case.hf_configs["actor"].num_hidden_layers > first * layout.pp  # untouched


def test_a_reduced_batch_fills_every_pipeline_with_equal_micro_batches():
    case = case_of("qwen2.5_32b_gsm8k_math")
    recipe = reduced_batch(case.recipe, case.world_size)
    # PP4, DP2, 2 and 16 sequences
    assert recipe.actor.ppo_mini_batch_size == recipe.data.train_batch_size == 160
    assert longest_batch(recipe).num_sequences == 160


@pytest.mark.parametrize("name", ["h100-80gb", "H100", "79.2", "80gib"])
def test_a_gpu_by_name_or_by_memory(name):
    assert 70 * GIB < find_gpu(name).nbytes <= 80 * GIB


def judged(peak: int, resident: int) -> Verdict:
    """The verdict on an actor of 7 billion parameters that stays on the GPU."""
    case = case_of("qwen2_7b_rm")
    shape = model_shape(case.hf_configs["actor"])
    engine = colocated_engine(case.recipe, case.world_size, shape, 7_000_000_000)
    moments = simulated_moments(result_of(peak, resident), case.recipe, engine)
    return judge(moments, case.recipe, case.gpu, engine)


def test_a_rank_that_fits_leaves_room_for_the_engine():
    verdict = judged(20 * GIB, 15 * GIB)
    assert verdict.fits
    assert not verdict.fixes
    assert verdict.kv_tokens > 100_000
    assert verdict.moments[0].beside["engine's graphs"] == ENGINE_GRAPHS


def test_a_rank_that_does_not_fit_names_fixes_with_their_size():
    verdict = judged(90 * GIB, 60 * GIB)
    assert not verdict.fits
    halved = next(fix for fix in verdict.fixes if "ppo_micro_batch_size_per_gpu" in fix)
    assert "actor.ppo_micro_batch_size_per_gpu (16)" in halved
    assert "15.0 GiB" in halved
    assert any("tensor_model_parallel_size" in fix for fix in verdict.fixes)


def test_a_timeline_is_a_chrome_trace(tmp_path):
    result = result_of(GIB, GIB)
    result.allocations = [
        Allocation(64 << 20, "actor weights", "a.py:1", 0, 0),
        Allocation(32 << 20, "updating actor", "b.py:2", 0, 1, 2),
    ]
    write_memory_trace(tmp_path / "trace.json", result)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[1] == {"actor weights": 64, "updating actor": 32}
    assert counters[-1]["updating actor"] == 0
    assert {event["ph"] for event in events} == {"b", "e", "C"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "--gpu = 'h1000'\n     why:  unknown GPU (did you mean h100-80gb?)"),
        (["--gpu", "0"], "--gpu = '0'\n     why:  unknown GPU"),
        (["trainer.gpu=h1000"], "trainer.gpu = 'h1000'\n     why:  unknown GPU"),
        (["--rank", "8"], "--rank 8: the world has 8 ranks; choose one from 0 to 7"),
        (["--rank", "-1"], "--rank -1: the world has 8 ranks"),
        (["--steps", "0"], "--steps 0: simulate at least one step"),
        (["--world-size", "5"], "8, but the run has 5 ranks"),
        (["actor.ppo_mini_batch_sise=3"], "ppo_mini_batch_sise"),
        (["model.path=/nowhere/at-all"], "/nowhere/at-all"),
        (["--timeline", "/nowhere/trace.json"], "--timeline /nowhere/trace.json: no folder"),
    ],
)
def test_bad_input_ends_with_one_message(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    assert main([str(ROOT / "recipes/qwen2_7b_rm.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_cpu_is_not_simulated(monkeypatch, capsys):
    monkeypatch.setenv("MPPO_DEVICE", "cpu")
    assert main([str(ROOT / "recipes/qwen2_7b_rm.yaml")]) == 2
    assert "MPPO_DEVICE=cpu" in capsys.readouterr().err


def test_an_installed_transformer_engine_needs_its_stand_in(monkeypatch, capsys, tmp_path):
    """Its kernels would be called with simulated tensors."""
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert main([str(ROOT / "recipes/qwen2_7b_rm.yaml")]) == 2
    cure = f"run mppo-simulate with --transformer-engine {tmp_path}, which"
    assert cure in capsys.readouterr().err
    assert simulate_stages(ROOT / "recipes/qwen2_7b_rm.yaml", (), None, None) == 2
    assert cure in capsys.readouterr().err, "train.py --dry-run --simulate has no such option"


def test_patterns_that_freeze_nothing_are_refused(capsys):
    recipe = str(ROOT / "recipes/qwen2_7b_gsm8k_math.yaml")
    assert main([recipe, "critic.freeze=[self_atn]"]) == 2
    assert "did you mean self_attn?" in capsys.readouterr().err


def test_another_transformer_engine_than_the_given_one_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    installed, given = tmp_path / "installed", tmp_path / "given"
    (installed / "transformer_engine").mkdir(parents=True)
    (installed / "transformer_engine" / "__init__.py").touch()
    (given / f"transformer_engine-{VERSION}.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    recipe = str(ROOT / "recipes/qwen2_7b_rm.yaml")
    assert main([recipe, "--transformer-engine", str(given)]) == 2
    assert f"imports Transformer Engine from {installed}" in capsys.readouterr().err


def test_a_dry_run_is_followed_by_a_simulation_of_every_stage():
    """Without the model's folder; the exit code is the simulation's."""
    recipe = ROOT / "recipes" / "deepseek_llm_7b_gsm8k_math.yaml"
    command = [sys.executable, "mppo/train.py", "--config", str(recipe), "--dry-run", "--simulate"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MPPO_", "NVTE_"))}
    run = subprocess.run(
        [*command, "--gpu", "20"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert run.returncode == 3, run.stderr
    assert "# layout of 8 ranks" in run.stdout
    assert run.stdout.index("# checkpoints") < run.stdout.index("# rank 0 of 8: actor")
    assert "# rank 4 of 8: actor" in run.stdout, "a rank of the second stage"
    # by the plan, and by the simulation of both stages
    assert run.stdout.count("does NOT fit") == 3
