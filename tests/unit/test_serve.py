"""A server on a node of its own starts with the recipe's options, and only with a key."""

from __future__ import annotations

import pytest

from mppo.rollout.fleet import API_KEY_VARIABLE
from mppo.serve import main, server_content

RECIPE = """
model: {path: "builtin:tiny", dtype: float32}
rollout: {name: sglang, server_args: {max_total_tokens: 4096}, tensor_model_parallel_size: 1}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_without_a_key_it_does_not_start(recipe, monkeypatch, capsys):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    arguments = ["--config", str(recipe), "--host", "127.0.0.1", "--port", "1"]
    assert main(arguments) == 2
    assert f"export {API_KEY_VARIABLE}=" in capsys.readouterr().err


def test_it_takes_the_options_of_the_recipe(recipe):
    content = server_content(recipe, ["rollout.dtype=bfloat16"], "10.0.0.7", 30000, "secret", True)
    assert content["max_total_tokens"] == 4096
    assert content["dtype"] == "bfloat16"
    assert content["load_format"] == "dummy"
    assert (content["host"], content["port"]) == ("10.0.0.7", 30000)
    assert content["api_key"] == "secret"
