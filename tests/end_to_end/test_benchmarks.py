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
    "estimators.py": ["--repeat", "1", "--sequences", "8", "--tokens", "64"],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_runs(tmp_path, name):
    out = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *SMALLEST[name], "--out", out],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(out.read_text())["command"].startswith("python")
