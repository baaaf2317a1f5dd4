"""A server on a node of its own starts with the recipe's options, and only with a key."""

from __future__ import annotations

import pytest
import transformers

from mppo.rollout.fleet import API_KEY_VARIABLE
from mppo.serve import main, server_start

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
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
    overrides = ["rollout.dtype=bfloat16"]
    content, environment = server_start(recipe, overrides, "10.0.0.7", 30000, "secret", True)
    assert content["max_total_tokens"] == 4096
    assert content["dtype"] == "bfloat16"
    assert content["load_format"] == "dummy"
    assert (content["host"], content["port"]) == ("10.0.0.7", 30000)
    assert content["api_key"] == "secret"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_it_serves_no_other_model_than_the_actors(recipe, tmp_path, monkeypatch, capsys):
    transformers.MistralConfig(**SIZES, sliding_window=16).save_pretrained(tmp_path / "mistral")
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    arguments = ["--config", str(recipe), "--host", "127.0.0.1", "--port", "1"]
    assert main([*arguments, f"model.path={tmp_path}/mistral"]) == 2
    assert "sliding_window = 16" in capsys.readouterr().err


def test_a_server_of_latent_attention_takes_the_class_with_the_actors_norms(recipe, tmp_path):
    transformers.DeepseekV3Config(**SIZES).save_pretrained(tmp_path / "moonlight")
    overrides = [f"model.path={tmp_path}/moonlight"]
    _, environment = server_start(recipe, overrides, "10.0.0.7", 30000, "secret", True)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "mppo.rollout.sglang_models"
