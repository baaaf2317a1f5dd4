"""Downloads from the Hub: which models and files, and the message without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from mppo.hub.builtin import read_model_config, resolve_model
from mppo.hub.download import LEFT_OUT, file_patterns
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.train import main
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[2]
NAME = "Qwen/Qwen2.5-0.5B-Instruct"
TASK = ["data.task=arithmetic", "data.max_prompt_length=32", "data.max_response_length=16"]
REPOSITORY = [
    ".gitattributes", "LICENSE", "README.md", "config.json", "generation_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin", "model.gguf",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "modeling_x.py", "original/params.json", "onnx/model.onnx",
]  # fmt: skip
TEXTS = {
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
}  # fmt: skip
WEIGHTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("weights", "code", "files"),
    [
        (True, False, TEXTS | WEIGHTS),
        (False, False, TEXTS),
        (True, True, TEXTS | WEIGHTS | {"modeling_x.py"}),
    ],
)
def test_only_files_of_the_model_are_downloaded(weights, code, files):
    patterns = list(file_patterns(weights, code))
    taken = filter_repo_objects(REPOSITORY, allow_patterns=patterns, ignore_patterns=list(LEFT_OUT))
    assert set(taken) == files


class Hub:
    """In place of ``fetch_model``: returns a local folder and records the calls."""

    def __init__(self, folder: Path, missing: str = "") -> None:
        self.folder, self.missing = folder, missing
        self.asked: list[tuple[str, bool, bool]] = []

    def fetch(self, name: str, hub: bool | str, weights: bool, trust_remote_code: bool) -> Path:
        assert hub is True
        self.asked.append((name, weights, trust_remote_code))
        if name == self.missing:
            raise ConfigError(
                [ConfigIssue("model.path", name, "is not to be had", "name a folder")]
            )
        return self.folder


@pytest.fixture
def hub(tmp_path):
    return Hub(resolve_model("builtin:tiny", tmp_path))


def load(hub: Hub, *settings: str, files: bool = True):
    def read(path: str):
        return read_model_config(resolve_model(path))

    overrides = [*TASK, *settings]
    return load_checked(None, overrides, 1, read, files, fetch_model=hub.fetch)


def test_nothing_is_downloaded_without_model_hub(hub):
    with pytest.raises(ConfigError, match="not downloaded by default"):
        load(hub, f"model.path={NAME}")
    assert hub.asked == []


def test_a_hub_name_becomes_a_folder(hub):
    recipe = load(hub, f"model.path={NAME}", "model.hub=true", "model.trust_remote_code=true")
    assert recipe.model.path == str(hub.folder)
    assert hub.asked == [(NAME, True, True)]


def test_a_dry_run_needs_no_weights(hub):
    load(hub, f"model.path={NAME}", "model.hub=true", files=False)
    assert hub.asked == [(NAME, False, False)]


def test_only_used_models_that_are_not_folders_are_downloaded(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    Path("owner/model").symlink_to(hub.folder)
    recipe = load(hub, "model.path=owner/model", "model.hub=true", f"critic.path={NAME}")
    assert (recipe.model.path, recipe.critic.path) == ("owner/model", str(hub.folder))
    assert hub.asked == [(NAME, True, False)]


def test_an_unavailable_model_is_an_issue_of_its_key(hub):
    hub.missing = "owner/none"
    with pytest.raises(ConfigError) as caught:
        load(hub, "model.hub=true", "critic.path=owner/none")
    assert [issue.key for issue in caught.value.issues] == ["critic.path"]


@pytest.mark.parametrize(
    "environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}]
)
def test_an_unreachable_hub_is_one_clear_issue(environment, tmp_path):
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), **environment}
    result = subprocess.run(
        [sys.executable, str(ROOT / "mppo" / "train.py"), "--dry-run", "model.hub=true",
         f"model.path={NAME}", *TASK],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert ": 1 issue\n" in result.stderr
    assert "cannot be downloaded from the Hugging Face Hub" in result.stderr
    assert "download the model elsewhere and name its folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_modelscope_needs_its_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    settings = [f"model.path={NAME}", "model.hub=modelscope", *TASK]
    assert main(["--dry-run", *settings]) == 2
    message = capsys.readouterr().err
    assert ": 1 issue\n" in message
    assert "model.hub = 'modelscope'" in message
    assert "the package modelscope is not installed" in message
    assert 'pip install "mppo[modelscope]", or set model.hub: true' in message


def test_the_hub_is_part_of_the_request(hub):
    asked = []

    def fetch(name: str, chosen: bool | str, weights: bool, trust_remote_code: bool) -> Path:
        asked.append((name, chosen))
        return hub.folder

    settings = [*TASK, f"model.path={NAME}", "model.hub=modelscope"]
    assert load_checked(None, settings, 1, fetch_model=fetch).model.path == str(hub.folder)
    assert asked == [(NAME, "modelscope")]
