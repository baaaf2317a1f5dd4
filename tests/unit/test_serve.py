"""``mppo.serve`` uses the recipe's options and the model's weights, and needs a key."""

from __future__ import annotations

import json
import socket

import pytest
import transformers

from mppo.hub.builtin import resolve_model
from mppo.recipe.errors import ConfigError
from mppo.rollout.served_model import server_start
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
from mppo.serve import main

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


def arguments(recipe, port: int = 1):
    return ["--config", str(recipe), "--host", "127.0.0.1", "--port", str(port)]


def test_serve_needs_a_key(recipe, monkeypatch, capsys):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert main(arguments(recipe)) == 2
    shown = capsys.readouterr().err
    assert API_KEY_VARIABLE in shown
    assert "export what `openssl rand -hex 16` prints" in shown


def test_a_port_in_use_is_reported_before_anything_starts(recipe, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(arguments(recipe, port)) == 2
    shown = capsys.readouterr().err
    assert f"--port = '127.0.0.1:{port}'" in shown
    assert "cannot listen there: Address already in use" in shown


def test_serve_uses_the_recipes_options(recipe):
    overrides = ["rollout.dtype=bfloat16"]
    content, environment = server_start(recipe, overrides, empty=True, on_cpu=True)
    assert content["max_total_tokens"] == 4096
    assert content["dtype"] == "bfloat16"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_serve_refuses_models_that_sglang_computes_differently(
    recipe, tmp_path, monkeypatch, capsys
):
    transformers.MistralConfig(**SIZES, sliding_window=16).save_pretrained(tmp_path / "mistral")
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert main(["--empty", *arguments(recipe), f"model.path={tmp_path}/mistral"]) == 2
    assert "sliding_window = 16" in capsys.readouterr().err


def test_an_mla_server_uses_the_class_with_the_actors_norms(recipe, tmp_path):
    transformers.DeepseekV3Config(**SIZES).save_pretrained(tmp_path / "moonlight")
    overrides = [f"model.path={tmp_path}/moonlight"]
    _, environment = server_start(recipe, overrides, empty=True, on_cpu=True)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "mppo.rollout.sglang_models"


@pytest.mark.parametrize("engine", ["sglang", "local"])
def test_serve_loads_the_models_weights_unless_a_run_sends_them(engine, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{path: 'builtin:tiny'}}\nrollout: {{name: {engine}}}\n")
    own, _ = server_start(path, [], empty=False, on_cpu=True)
    assert (own["load_format"], own["skip_tokenizer_init"]) == ("auto", False)
    empty, _ = server_start(path, [], empty=True, on_cpu=True)
    assert (empty["load_format"], empty["skip_tokenizer_init"]) == ("dummy", True)
    assert own["model_path"] == empty["model_path"] == str(resolve_model("builtin:tiny"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no config.json"),
        (["config.json"], "has no *.safetensors"),
        (None, "not downloaded by default"),
    ],
)
def test_a_model_without_weights_is_refused(files, message, recipe, tmp_path):
    folder = "owner/model"
    if files is not None:
        folder = tmp_path / "model"
        folder.mkdir()
        for name in files:
            (folder / name).write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError) as caught:
        server_start(recipe, [f"model.path={folder}"], empty=False, on_cpu=True)
    assert [issue.key for issue in caught.value.issues] == ["model.path"]
    assert message in str(caught.value)
