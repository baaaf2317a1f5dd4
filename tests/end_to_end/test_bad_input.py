"""Bad input, seen from a shell: one clear message, exit code 2, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed_plugins import installed

ROOT = Path(__file__).parents[2]
GOOD = """
model: {path: "builtin:tiny", dtype: float32}
data: {task: arithmetic, max_prompt_length: 32, max_response_length: 16, train_batch_size: 8}
actor: {ppo_mini_batch_size: 4}
"""


def run(
    command: list[str], tmp_path: Path, *arguments: str, path: str = str(ROOT)
) -> subprocess.CompletedProcess:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(GOOD)
    return subprocess.run(
        [*command, str(ROOT / "mppo" / "train.py"), "--config", str(recipe), *arguments],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_faulty_recipe_from_plain_python(tmp_path):
    result = run([sys.executable], tmp_path, "actor.ppo_mini_batch=3", "rollout.temperature=0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert ": 2 issues" in result.stderr
    assert "did you mean actor.ppo_mini_batch_size?" in result.stderr


def test_a_data_file_that_is_not_json(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    settings = ("data.task=null", f"data.train_files=[{rows}]")
    result = run([sys.executable], tmp_path, *settings)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert f"{rows} line 2" in result.stderr
    assert "not valid JSON" in result.stderr


def test_a_reward_function_that_is_not_there(tmp_path):
    settings = ("reward.name=function", "reward.function=no_such_module:score")
    result = run([sys.executable], tmp_path, *settings)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "reward.function" in result.stderr


@pytest.mark.server
def test_two_ranks_print_an_error_once_and_torchrun_nothing(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    keys = ("actor.megatron.tensor_model_parallel_size=4",)
    result = run(torchrun, tmp_path, *keys, path=installed(tmp_path / "installed"))
    assert result.returncode == 1
    assert result.stderr.count("world size 2 is not a multiple") == 1
    after = result.stderr.partition("world size 2 is not a multiple")[2]
    assert len(after.splitlines()) < 5, "torchrun adds nothing"
    assert "exitcode" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_dry_run_needs_no_launcher(tmp_path):
    arguments = ("--dry-run", "--world-size", "4", "actor.megatron.tensor_model_parallel_size=4")
    result = run([sys.executable], tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert "# layout of 4 ranks" in result.stdout
    assert "TP4" in result.stdout
