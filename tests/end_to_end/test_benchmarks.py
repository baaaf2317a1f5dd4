"""Every benchmark that calls the library runs, at its smallest size."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from browser import NAMES
from ranks import begin_ranks
from sglang_case import needs_sglang

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "convert.py": ["--model", "dense", "--gb", "0", "--hidden", "128", "--processes", "1",
                   "--rounds", "1", "--folder", "."],
    "ppo_step.py": ["--without-trl", "--dtypes", "float32", "--steps", "1", "--warm-up", "0"],
    "trl_curves.py": ["--without-trl", "--seeds", "0", "--steps", "2"],
    "rollout.py": ["--repeat", "1", "--prompts", "2", "--response-length", "4"],
    "moe_step.py": ["speed", "--repeat", "1", "--sequences", "2", "--longest", "16"],
    "checkpoint.py": ["--repeat", "1", "--vocabulary", "512", "--hidden", "128", "--layers", "2",
                      "--tokens", "128", "--folder", "."],
    "soak.py": ["--agents", "--kills", "1", "--steps", "3", "--minutes", "10",
                "--seed", "6"],  # kills an agent
    "episode_soak.py": ["--engine", "local", "--episodes", "24", "--batch", "8"],
    "estimators.py": ["--repeat", "1", "--sequences", "8", "--tokens", "64"],
    "weight_sync.py": ["--layers", "1", "--repeat", "2"],
    "sync_routes.py": ["--layers", "1", "--repeat", "1"],
    "simulate.py": ["deepseek_llm_7b_gsm8k_math", "--stages", "first", "--table", "table.md"],
    "simulate_layouts.py": ["--seeds", "2"],
    "simulate_recipes.py": ["--recipes", "tiny_cpu_tp2_pp2"],
    "offload.py": ["--megabytes", "8", "--hidden", "64", "--layers", "1", "--sequences", "2",
                    "--repeat", "2"],
    "report.py": ["--steps", "20", "--ranks", "40", "--repeat", "1"],
    "cpu_twin.py": ["--hidden", "64", "--steps", "2", "--layouts", "DP2", "--repeat", "2"],
    "schedule.py": ["--stages", "4", "--milliseconds", "2", "--layers", "2", "--tokens", "16",
                    "--repeat", "1"],
    "random_schedules.py": ["--updates", "20"],
    "critic_keeps_up.py": ["--seeds", "0", "--steps", "2", "--warm-start", "1", "--pretraining",
                           "1", "--answers", "4", "--cases", "ppo@0", "no_dis@8", "values",
                           "pretrained"],
    "value_head.py": ["--seeds", "2", "--steps", "2", "--warm-start", "1", "--tasks", "reverse",
                      "--heads", "0", "0.02"],
}  # fmt: skip
LOOKED_AT = {
    "checkpoint.py", "critic_keeps_up.py", "report.py", "rollout.py", "schedule.py", "simulate.py",
    "soak.py", "sync_routes.py", "value_head.py", "weight_sync.py",
}  # fmt: skip
"""Benchmarks with a separate test of their results."""
SIMULATING = {"simulate.py", "simulate_layouts.py"}
"""Benchmarks that need an interpreter of their own, without Megatron's stand-ins for the CPU."""


def smallest(name: str, folder: Path, *more: str) -> dict:
    """Run a benchmark at its smallest size; the result it writes."""
    result = json.loads(run_smallest(name, folder / "result.json", *more))
    assert result["command"].startswith("python")
    return result


def run_smallest(name: str, out: Path, *more: str) -> str:
    """Run a benchmark at its smallest size in the folder of ``out``; what it writes there."""
    command = [str(ROOT / "benchmarks" / name), *SMALLEST[name], *more, "--out", str(out)]
    printed = out.with_name("printed.txt")
    if name in SIMULATING:
        with printed.open("w") as stream:
            code = subprocess.run(
                [sys.executable, *command], cwd=out.parent, stdout=stream, stderr=stream
            ).returncode
    else:
        (process,) = begin_ranks(_program, (command, printed), 1).processes
        process.join()
        code = process.exitcode
    assert code == 0, printed.read_text()[-3000:]
    return out.read_text()


def _program(rank: int, command: Sequence[str], printed: Path) -> None:
    """A benchmark, as ``python`` runs it, in a process that has imported the libraries."""
    with printed.open("w") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
    os.chdir(printed.parent)
    sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = list(command)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


@pytest.mark.parametrize("name", sorted(SMALLEST.keys() - LOOKED_AT))
def test_benchmark_runs(tmp_path, name):
    smallest(name, tmp_path)


def test_generation_is_timed_on_prompts_of_one_length_and_of_many(tmp_path):
    result = smallest("rollout.py", tmp_path)
    mixed = result["mixed_prompts_ending_early"]
    assert mixed.keys() <= result.keys()
    assert set(result["generated_tokens"].values()) == {2 * 4}, "no row ends before the others"
    assert len(set(mixed["prompt_tokens"])) == 2
    for case in (result, mixed):
        tokens, seconds = case["generated_tokens"], case["seconds"]
        assert 2 <= tokens["mppo"] == tokens["transformers"] <= 2 * 4, "the work is the same"
        rates = {name: tokens[name] / seconds[name] for name in seconds}
        assert case["tokens_per_s"] == pytest.approx(rates)
        ratio = rates["mppo"] / rates["transformers"]
        assert case["transformers_over_mppo"] == pytest.approx(ratio)


def test_saves_and_loads_are_timed(tmp_path):
    result = smallest("checkpoint.py", tmp_path)
    assert result["parameters"] > 1e5
    assert result["ratios"].keys() == {
        "blocking share of an asynchronous save",
        "write rate over copy rate",
        "load, other layout over same",
        "processor in a load, other layout over same",
    }
    assert len(result["median_seconds"]) == 9
    assert all(value >= 0 for value in result["median_seconds"].values())
    assert not list(tmp_path.glob("tmp*")), "what was written is removed"


def test_a_report_is_made_and_drawn(tmp_path):
    ((name, run),) = smallest("report.py", tmp_path)["runs"].items()
    assert name == "20 steps, 40 ranks"
    assert run["make_s"] > 0
    assert 0 < run["page_mb"] < 1
    assert (run["drawn_ms"] is not None) == any(map(shutil.which, NAMES))


def test_value_heads_are_compared_within_a_seed(tmp_path):
    result = smallest("value_head.py", tmp_path)
    rewards = result["rewards"]["reverse"]
    assert [len(curve) for curves in rewards.values() for curve in curves] == [2, 2, 2, 2]
    first, second = ([sum(curve) / 2 for curve in rewards[head]] for head in ("0", "0.02"))
    difference = result["comparison"]["reverse"]["0 - 0.02"]
    assert difference["mean"] == pytest.approx((sum(first) - sum(second)) / 2, abs=1e-3)
    low, high = difference["interval_95"]
    assert low <= difference["mean"] <= high
    assert (tmp_path / "result.md").read_text().count("| 0 - 0.02 |") == 1
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")


def test_policies_on_old_samples_and_starts_of_the_critic_are_put_into_a_table(tmp_path):
    result = smallest("critic_keeps_up.py", tmp_path)
    lengths = {case: len(curves["reward"][0]) for case, curves in result["cases"].items()}
    assert lengths == {"ppo@0": 2, "no_dis@8": 2, "values": 1, "pretrained": 1}
    text = (tmp_path / "result.md").read_text()
    assert text.count("| `no_dis@8` | 0 | ") == 1
    assert text.count("Explained variance at step 1, `pretrained`: ") == 1
    assert "Batches of `values`, and its gate of 0.5: 1 (did not hold)." in text
    assert [len(known) for known in result["explainable"].values()] == [1, 1]
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")


def test_schedules_with_waits_are_put_into_a_table(tmp_path):
    text = run_smallest("schedule.py", tmp_path / "result.md", "waits")
    rows = [line for line in text.splitlines() if line.startswith("| 4 |")]
    assert {row.split("|")[5].strip() for row in rows} == {"sequential", "fused", "flush_free"}
    assert len(rows) == 12


def test_schedules_with_several_updates_of_the_critic_are_put_into_tables(tmp_path):
    text = run_smallest("schedule.py", tmp_path / "result.md", "critic")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    measured = [row for row in rows if len(row) == 11 and row[1] == "4"]
    assert [row[3:5] for row in measured] == [["1", "2"], ["1", "4"], ["4", "2"]] * 2
    assert all(float(row[7]) > 1 for row in measured), "simulated: flush_free is faster"
    models = [row[1:4] for row in rows if len(row) == 10][2:]
    assert models == [[count, *row[3:5]] for count in "24" for row in measured[:3]]


def test_schedules_with_real_models_are_put_into_a_table(tmp_path):
    text = run_smallest("schedule.py", tmp_path / "result.md", "real")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    assert [row[1:4] for row in rows if len(row) == 10][2:] == [["2", "4", "1"], ["4", "4", "1"]]
    memory = [row[1:3] for row in rows if len(row) == 6][2:]
    assert memory == [[kind, rank] for kind in ("sequential", "flush_free") for rank in "01"]


def test_simulated_ranks_are_put_into_a_table(tmp_path):
    result = smallest("simulate.py", tmp_path)
    ((name, rank),) = result["ranks"].items()
    assert name == "deepseek_llm_7b_gsm8k_math first"
    assert rank["resident_gib"] == pytest.approx(rank["planned_resident_gib"], rel=0.02)
    head, _, row = (tmp_path / "table.md").read_text().splitlines()
    assert row.startswith(f"| {name} | ")
    assert head.count("|") == row.count("|")


@pytest.mark.parametrize(
    ("model", "route", "tensors", "layer"),
    [("dense", "tensor", 2 + 8, 4 * 1024**2 + 3 * 2816 * 1024), ("moe", "disk", 2 + 192, 65 << 16)],
)
def test_weight_sync_is_compared_with_a_copy(tmp_path, model, route, tensors, layer):
    result = smallest("weight_sync.py", tmp_path, "--model", model, "--route", route)
    assert (result["tensors"], result["updates"]) == (tensors, 2)
    assert result["gigabytes"] * 1e9 > 2 * layer
    assert 0 < result["own_seconds"] <= result["seconds"]
    assert result["share_of_memcpy"] == result["memcpy_seconds"] / result["own_seconds"]


@pytest.mark.server
@needs_sglang
def test_every_route_is_timed_and_bytes_are_planned(tmp_path):
    result = smallest("sync_routes.py", tmp_path)
    assert result["routes"]["seconds"].keys() == {"tensor", "distributed", "disk"}
    assert all(seconds > 0 for seconds in result["routes"]["seconds"].values())
    for planned in result["bytes"].values():
        assert 0 < planned["crossing_gb"] < planned["held_gb"] < planned["gathered_gb"]


@pytest.mark.server
@needs_sglang
def test_the_drivers_overhead_is_measured_in_pairs(tmp_path):
    result = smallest("rollout.py", tmp_path, "--engine", "sglang")
    (mine,), (plain,) = (result["all_seconds"][name] for name in ("mppo", "plain_requests"))
    assert result["mppo_adds"] == mine / plain - 1
    assert result["tokens_per_s"]["mppo"] == 8 / mine
    driver = result["processor_seconds_of_the_driver"]
    assert result["mppo_adds_in_the_driver"] * plain == pytest.approx(
        driver["mppo"] - driver["plain_requests"]
    )


def test_a_soak_kills_resumes_and_compares(tmp_path):
    result = smallest("soak.py", tmp_path)
    assert result["kills_in_all"] == sum(result["kills"].values()) == 1
    assert result["runs_finished"] >= 1
    assert result["failures"] == []
