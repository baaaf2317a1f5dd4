"""A run that has not finished never ends with exit code 0, however a rank exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_run import ONE_STREAM, QUIET, ROOT, keys, steps_logged, torchrun

SCRIPT = """
import ctypes, os, sys, threading, time
from pathlib import Path

how, leaving, *arguments = sys.argv[1:]
sys.argv[1:] = arguments
(metrics,) = [Path(a.partition("=")[2]) / "metrics.jsonl" for a in arguments
              if a.startswith("trainer.default_local_dir=")]

def leave():
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.02)
    os._exit(0) if how == "python" else ctypes.CDLL(None)._exit(0)

if os.environ.get("RANK", "0") in leaving.split(","):
    threading.Thread(target=leave, daemon=True).start()
from mppo.train import main
sys.exit(main())
"""
STEPS = 400
"""More steps than are done when a rank exits after two."""


def run(tmp_path: Path, launcher: list[str], how: str, leaving: str, *overrides: str):
    script, run_dir = tmp_path / "leaving.py", tmp_path / "run"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [*launcher, str(script), how, leaving, *keys(run_dir, overrides, STEPS)],
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert 2 <= steps_logged(run_dir) < STEPS
    return result


@pytest.mark.parametrize(("leaving", "layout"), [("0", ()), ("1", ONE_STREAM)])
def test_the_launcher_fails_if_one_rank_exits_early_with_code_0(leaving, layout, tmp_path):
    result = run(tmp_path, torchrun(), "system", leaving, *layout)
    assert result.returncode != 0
    assert f"rank {leaving} of 2" in result.stderr
    assert "Root Cause" in result.stderr


def test_the_launcher_fails_if_all_ranks_exit_early_with_code_0(tmp_path):
    result = run(tmp_path, torchrun(), "python", "0,1")
    assert result.returncode != 0
    assert "os._exit(0) was called before the run had finished, while " in result.stderr


def test_a_single_process_that_exits_early_with_code_0_fails(tmp_path):
    one_rank = [f"{role}.megatron.{axis}_model_parallel_size=1"
                for role, axis in (("actor", "tensor"), ("critic", "pipeline"))]  # fmt: skip
    result = run(tmp_path, [sys.executable], "python", "0", *one_rank)
    assert result.returncode == 1
    assert "os._exit(0) was called before the run had finished, while " in result.stderr
