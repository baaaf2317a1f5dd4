"""Folders that verl saved are found by the path of the role."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hf_families import assert_same_tensors, save, tensors

from checkpoints_convert.__main__ import main
from mppo.hub.builtin import read_model_config, resolve_model
from mppo.hub.local_model import check_model_folder
from mppo.recipe.errors import ConfigError


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model as ``hf`` and as ``megatron``."""
    folder = tmp_path_factory.mktemp("verl")
    save("qwen2", folder / "hf")
    paths = ["--hf", str(folder / "hf"), "--megatron", str(folder / "megatron")]
    assert main(["hf-to-megatron", "--no-tokenizer", *paths]) == 0
    return folder


@pytest.mark.parametrize("inside", [".", "model"], ids=["2025", "2026"])
def test_megatrons_shards_are_found_beside_the_config(saved, tmp_path, inside) -> None:
    actor = tmp_path / "global_step_7" / "actor"
    shutil.copytree(saved / "megatron" / "release", actor / inside / "dist_ckpt")
    shutil.copytree(saved / "megatron" / "hf", actor / inside / "huggingface")
    folder = resolve_model(str(actor))
    assert folder == actor / inside / "dist_ckpt"
    assert read_model_config(folder).model_type == "qwen2"
    assert check_model_folder("model.path", str(actor)) == []
    back = tmp_path / "back"
    assert main(["megatron-to-hf", "--megatron", str(actor), "--hf", str(back)]) == 0
    assert_same_tensors(tensors(back), tensors(saved / "hf"))


def test_exported_weights_come_before_the_optimizers_shards(saved, tmp_path) -> None:
    actor = tmp_path / "actor"
    shutil.copytree(saved / "megatron" / "release", actor / "dist_ckpt")
    shutil.copytree(saved / "hf", actor / "huggingface")
    assert resolve_model(str(actor)) == actor / "huggingface"


def test_shards_of_fsdp_are_refused_with_verls_command(tmp_path, capsys) -> None:
    (tmp_path / "model_world_size_8_rank_0.pt").touch()
    with pytest.raises(ConfigError, match=r"verl\.model_merger merge --backend fsdp"):
        resolve_model(str(tmp_path))
    (issue,) = check_model_folder("model.path", str(tmp_path))
    assert "saved with FSDP" in issue.why
    paths = ["--megatron", str(tmp_path), "--hf", str(tmp_path / "hf")]
    assert main(["megatron-to-hf", *paths]) == 2
    assert "verl.model_merger" in capsys.readouterr().err
