"""A run that has not finished never ends with exit code 0, however a rank exits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import leaving_rank
from launched_run import ONE_STREAM, QUIET, ROOT, LaunchedRun, keys, steps_logged, torchrun

STEPS = 400
"""More steps than are done when a rank exits after two."""


def arguments(run_dir: Path, how: str, leaving: str, *overrides: str) -> list[str]:
    return [how, leaving, *keys(run_dir, overrides, STEPS)]


def test_the_launcher_fails_if_a_rank_exits_early_with_code_0(tmp_path):
    result = subprocess.run(
        [*torchrun(), leaving_rank.__file__, *arguments(tmp_path, "system", "0")],
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert 2 <= steps_logged(tmp_path) < STEPS
    assert result.returncode != 0
    assert "rank 0 of 2" in result.stderr
    assert "Root Cause" in result.stderr


def left(tmp_path: Path, world: int, *choices: str) -> tuple[list[int | None], str]:
    """Exit codes and output of a run that ranks leave, as a launcher gets them."""
    run = LaunchedRun(tmp_path, (), "leaving_rank", arguments(tmp_path, *choices), world)
    codes = run.codes()
    assert 2 <= steps_logged(tmp_path) < STEPS
    return codes, run.texts()


def test_another_rank_fails_if_one_exits_early_with_code_0(tmp_path):
    codes, text = left(tmp_path, 2, "system", "1", *ONE_STREAM)
    assert codes == [1, 0]
    assert "rank 1 of 2" in text


def test_ranks_that_exit_early_in_python_with_code_0_fail(tmp_path):
    codes, text = left(tmp_path, 2, "python", "0,1")
    assert codes == [1, 1]
    assert "os._exit(0) was called before the run had finished, while " in text


def test_a_single_process_that_exits_early_with_code_0_fails(tmp_path):
    one_rank = [f"{role}.megatron.{axis}_model_parallel_size=1"
                for role, axis in (("actor", "tensor"), ("critic", "pipeline"))]  # fmt: skip
    codes, text = left(tmp_path, 1, "python", "0", *one_rank)
    assert codes == [1]
    assert "os._exit(0) was called before the run had finished, while " in text
