"""A user's error gives one message: no traceback, exit code 2, and if torchrun reports on it, its
last lines repeat it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from installed_plugins import installed
from launched_run import TRAIN, torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer

from mppo.evaluate import main as evaluate
from mppo.hub.builtin import resolve_model
from mppo.train import main

TINY = [
    "model.dtype=float32", "data.task=arithmetic", "data.train_size=8", "data.val_size=0",
    "data.max_prompt_length=16", "data.max_response_length=4", "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8", "trainer.total_training_steps=1", "trainer.export_hf=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A model in several weight files."""
    folder, builtin = tmp_path_factory.mktemp("models") / "whole", resolve_model("builtin:tiny")
    AutoModelForCausalLM.from_pretrained(builtin).save_pretrained(folder, max_shard_size="1MB")
    AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)
    return folder


def without_a_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def with_half_a_shard(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size // 2)


def with_a_broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 320}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_shard, "not in the folder"),
        (with_half_a_shard, "cut short"),
        (with_a_broken_index, "Expecting property name"),
        (of_another_size, "they do not belong together"),
    ],
)
def test_a_damaged_model_is_reported_without_a_traceback(damage, message, sharded, tmp_path, capfd):
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    damage(folder)
    keys = [f"model.path={folder}", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main([*TINY, *keys]) == 2
    shown = capfd.readouterr().err
    assert message in shown
    assert str(folder) in shown
    assert "Traceback" not in shown


def test_a_rendezvous_port_in_use_is_reported(tmp_path, capfd, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        assert main([*TINY, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 2
    shown = capfd.readouterr().err
    assert f"MASTER_PORT={port}: another program on this machine uses the port" in shown
    assert "Traceback" not in shown


def test_torchruns_last_lines_give_the_reason_where_mppo_is_not_installed(tmp_path):
    path = installed(tmp_path / "installed", with_plugins=False)
    result = subprocess.run(
        [*torchrun(), TRAIN, *TINY, "actor.ppo_mini_batch=3"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    fault = "did you mean actor.ppo_mini_batch_size?"
    report = result.stderr.partition("Root Cause (first observed failure):")[2]
    assert result.returncode == 1
    assert result.stderr.count(fault) == 2
    assert fault in report
    assert "exitcode  : 2" in report
    assert len(report.splitlines()) < 15


def test_a_missing_shard_ends_an_evaluation_without_a_traceback(
    sharded, tmp_path, capfd, monkeypatch
):
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    without_a_shard(folder)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {task: arithmetic, max_prompt_length: 16, max_response_length: 4}\n")
    monkeypatch.chdir(tmp_path)
    assert evaluate(["--config", str(recipe), f"model.path={folder}"]) == 2
    shown = capfd.readouterr().err
    assert "not in the folder" in shown
    assert "Traceback" not in shown
