"""Several starts in one run folder: finished, refused, resumed earlier, stopped, full disk."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched_run import LaunchedRun, steps_logged

from mppo.train import main as train

RECIPE = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=16",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=5",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "trainer.val_before_train=false",
    "trainer.warm_start_batch_size=4",
]
SMALL_BYTES = 500_000
"""Bytes: less than a model, more than any other file of a run."""


def start(folder: Path, keys: Sequence[str], program: str = "mppo.train") -> LaunchedRun:
    """Start one rank with the run folder ``folder``/run; its output is beside that folder."""
    argv = [*RECIPE, f"trainer.default_local_dir={folder}/run", *keys]
    return LaunchedRun(folder, program=program, argv=argv, world=1)


def ended(folder: Path, keys: Sequence[str], program: str = "mppo.train") -> tuple[int | None, str]:
    """Exit code and output of a start; checks that there is no traceback."""
    started = start(folder, keys, program)
    (code,) = started.codes()
    text = started.text(0)
    assert "Traceback" not in text, text
    return code, text


def contents(run: Path) -> dict[str, str]:
    """A hash of every file of a run except the lock, which names its last holder."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_run_folder_through_several_starts(tmp_path):
    run, keys = tmp_path / "run", ["trainer.warm_start_steps=2", "trainer.save_freq=1"]
    two = [*keys, "trainer.total_training_steps=2"]
    (run / "actor").mkdir(parents=True)
    (run / "actor/notes.txt").write_text("of the user")
    code, text = ended(tmp_path, two)
    assert code == 0, text
    assert (run / "actor.old-1/notes.txt").read_text() == "of the user"
    assert f"kept {run}/actor.old-1" in text
    assert (run / "actor/model.safetensors").exists()

    before = contents(run)
    code, text = ended(tmp_path, two)
    assert (code, contents(run)) == (0, before), text
    assert f"nothing is left to do: the run in {run} has finished its 2 steps" in text

    three = [*keys, "trainer.total_training_steps=3"]
    path = "trainer.resume_mode=resume_path trainer.resume_from_path={}/checkpoints/global_step_1"
    back = path.format(run).split()
    refused = {
        "holds another model as actor": [*three, "actor.optim.lr=1e-5", "model.dtype=bfloat16"],
        "is not a folder": [*three, *path.format(run).replace("checkpoints", "chekpoints").split()],
        "overwrite the model it starts from": [*three, f"ref.path={run}/actor", KL],
    }
    for message, overrides in refused.items():
        code, text = ended(tmp_path, overrides)
        assert (code, contents(run)) == (2, before), text
        assert message in text

    weights = run / "warm_start/model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = contents(run)
    code, text = ended(tmp_path, three)
    assert (code, contents(run)) == (2, before), text
    assert "warm_start/model.safetensors: its checksum differs from" in text
    weights.write_bytes(data)

    code, text = ended(tmp_path, [*two, *back])
    assert code == 0, text
    assert (run / "earlier-1/checkpoints/global_step_2").is_dir()
    assert (run / "earlier-1/actor/model.safetensors").exists()
    assert steps_logged(run / "earlier-1") == steps_logged(run) == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert "Finished after 2 steps" in (run / "report.md").read_text()


KL = "algorithm.use_kl_in_reward=true"


def test_a_stop_request_in_the_warm_start_ends_the_run_at_once(tmp_path):
    started = start(tmp_path, ["trainer.warm_start_steps=5000"])
    said = tmp_path / "output_0.txt"
    started.until(lambda: said.exists() and "validation: 4" in said.read_text())
    started.send(0, signal.SIGTERM)
    assert started.codes() == [0], started.texts()
    assert "stopped before the first step: nothing to save" in started.text(0)
    assert not (tmp_path / "run/warm_start").exists()


def train_with_short_files(argv: Sequence[str]) -> int:
    """Train with a limit on the file size below that of a model."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, SMALL_BYTES))
    return train(argv)


main = train_with_short_files
ONE = ["trainer.total_training_steps=1"]


def test_a_model_over_the_file_size_limit_ends_the_run_with_one_line(tmp_path):
    code, text = ended(tmp_path, ONE, program=__name__)
    assert code == 1, text
    assert "failed while export: the file is longer than this process may write: " in text
    assert "run/.actor.partial/model.safetensors; raise ulimit -f" in text
    assert "Failed after 1 steps" in (tmp_path / "run/report.md").read_text()


def test_a_disk_that_fills_up_ends_the_run_with_one_line(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(run)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    try:
        code, text = ended(tmp_path, ONE)
        assert code == 1, text
        assert "failed while export: the disk is full: " in text
        assert "trainer.default_local_dir" in text
        assert steps_logged(run) == 1
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)
