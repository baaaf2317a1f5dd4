"""A dry run and a simulation know the models of the shipped recipes, which need not be there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mppo.hub.model_config import ModelConfigs
from mppo.recipe.errors import ConfigError
from mppo.train import main

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen2.5_0.5b_gsm8k.yaml"
NAME = "Qwen2.5-0.5B-Instruct"
SHIPPED = ROOT / "recipes" / "configs" / NAME


def test_a_model_that_is_not_here_is_the_one_beside_the_recipe(tmp_path, capsys):
    path = tmp_path / NAME
    assert main(["--config", str(RECIPE), "--dry-run", f"model.path={path}"]) == 0
    shown = capsys.readouterr()
    assert f"mppo: {path} is not on this machine: taking {SHIPPED}" in shown.err
    assert "494,032,768" in shown.out
    assert "fits, with" in shown.out


def test_a_model_that_is_here_and_damaged_is_an_issue(tmp_path, capsys):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").write_text("{")
    options = ["--config", str(RECIPE), f"model.path={tmp_path / NAME}"]
    assert main([*options, "--dry-run"]) == 2
    assert "model.path" in capsys.readouterr().err


def test_a_run_needs_the_model_itself(tmp_path, capsys):
    options = ["--config", str(RECIPE), f"model.path={tmp_path / NAME}", "data.task=arithmetic"]
    assert main([*options, "data.train_files=[]", "data.val_files=[]"]) == 2
    shown = capsys.readouterr().err
    assert "no such folder" in shown
    assert "taking" not in shown


@pytest.mark.parametrize("name", [NAME, "another"])
def test_without_its_hub_a_model_is_the_one_beside_the_recipe(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    configs = ModelConfigs(RECIPE)
    if name == NAME:
        assert configs.fetch(f"owner/{name}", "modelscope", False, False) == SHIPPED
        assert configs.remarks == [f"owner/{NAME} is not on this machine: taking {SHIPPED}"]
    else:
        with pytest.raises(ConfigError, match="modelscope is not installed"):
            configs.fetch(f"owner/{name}", "modelscope", False, False)
