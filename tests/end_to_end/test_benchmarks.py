"""Benchmarks that call the library themselves still run, in their smallest form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "convert.py": ["--model", "dense", "--gb", "0", "--hidden", "128", "--processes", "1",
                   "--rounds", "1", "--folder", "."],
    "ppo_step.py": ["--dtypes", "float32", "--steps", "1", "--warm-up", "0"],
    "rollout.py": ["--repeat", "1", "--prompts", "2", "--response-length", "4"],
    "moe_step.py": ["speed", "--repeat", "1", "--sequences", "2", "--longest", "16"],
    "checkpoint.py": ["--repeat", "1", "--vocabulary", "512", "--hidden", "128", "--layers", "2",
                      "--tokens", "128", "--folder", "."],
    "soak.py": ["--kills", "1", "--steps", "3", "--minutes", "10"],
    "estimators.py": ["--repeat", "1", "--sequences", "8", "--tokens", "64"],
}  # fmt: skip


def smallest(name: str, folder: Path) -> dict:
    """What a benchmark writes in its smallest form."""
    out = folder / "result.json"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *SMALLEST[name], "--out", out],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["command"].startswith("python")
    return result


@pytest.mark.parametrize("name", sorted(SMALLEST.keys() - {"checkpoint.py", "soak.py"}))
def test_benchmark_runs(tmp_path, name):
    smallest(name, tmp_path)


def test_saves_and_loads_are_timed(tmp_path):
    result = smallest("checkpoint.py", tmp_path)
    assert result["parameters"] > 1e5
    assert result["ratios"].keys() == {
        "blocking share of an asynchronous save",
        "write rate over copy rate",
        "load, other layout over same",
    }
    assert len(result["median_seconds"]) == 7
    assert all(value >= 0 for value in result["median_seconds"].values())
    assert not list(tmp_path.glob("tmp*")), "what was written is removed"


def test_a_soak_kills_resumes_and_compares(tmp_path):
    result = smallest("soak.py", tmp_path)
    assert result["kills_in_all"] == sum(result["kills"].values()) == 1
    assert result["runs_finished"] >= 1
    assert result["failures"] == []
