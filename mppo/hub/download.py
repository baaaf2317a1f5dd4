"""Download of models from the Hugging Face Hub or ModelScope; runs only with ``model.hub``."""

from __future__ import annotations

import fcntl
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mppo.hub.builtin import cache_folder
from mppo.recipe.errors import ConfigError, config_error
from mppo.recipe.sections.model import Hub

CONFIG_FILES = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "*.jinja")
WEIGHT_FILES = ("*.safetensors",)
CODE_FILES = ("*.py",)
LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Other forms of the same weights."""


def file_patterns(weights: bool, trust_remote_code: bool) -> tuple[str, ...]:
    """Patterns of the files to download: config.json and tokenizer, and if asked for, the weights
    and the model's Python code."""
    parts = (CONFIG_FILES, WEIGHT_FILES if weights else (), CODE_FILES if trust_remote_code else ())
    return tuple(pattern for part in parts for pattern in part)


def fetch_model(name: str, hub: Hub, weights: bool, trust_remote_code: bool) -> Path:
    """Return the folder of a model (``owner/model``) in its hub's cache; download it
    (``file_patterns``) if it is not there. If several processes of a node call this, one downloads
    and the others wait for it.

    Raises:
        ConfigError: the hub cannot be reached, or has no such model.
    """
    patterns = list(file_patterns(weights, trust_remote_code))
    return (_from_modelscope if hub == "modelscope" else _from_hugging_face)(name, patterns)


def _from_hugging_face(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    try:
        with one_at_a_time(cache / f"mppo--{name.replace('/', '--')}.lock"):
            folder = snapshot_download(name, allow_patterns=patterns, ignore_patterns=[*LEFT_OUT])
    except (OSError, ValueError) as error:
        fix = (
            "check the name; if this host cannot reach the Hub, download the model elsewhere and "
            "name its folder; a gated model needs HF_TOKEN"
        )
        raise _model_error(name, error, "the Hugging Face Hub", fix) from error
    return Path(folder)


def _from_modelscope(name: str, patterns: list[str]) -> Path:
    try:
        modelscope = importlib.import_module("modelscope")
    except ModuleNotFoundError as error:
        why = f"the package {error.name} is not installed"
        fix = 'pip install "mppo[modelscope]", or set model.hub: true for the Hugging Face Hub'
        raise config_error("model.hub", "modelscope", why, fix) from error
    try:
        with one_at_a_time(cache_folder() / f"modelscope--{name.replace('/', '--')}.lock"):
            folder = modelscope.snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=[*LEFT_OUT]
            )
    except Exception as error:  # modelscope's errors have no base class in its older versions
        fix = (
            "check the name; if this host cannot reach ModelScope, download the model elsewhere "
            "and name its folder"
        )
        raise _model_error(name, error, "ModelScope", fix) from error
    return Path(folder)


def _model_error(name: str, error: Exception, hub: str, fix: str) -> ConfigError:
    why = explain(error, f"cannot be downloaded from {hub}")
    return config_error("model.path", name, why, fix)


def explain(error: Exception, what: str) -> str:
    """Return what failed and why in one line, without the number of the request."""
    text = " ".join(str(error).split())
    return re.sub(r"\s*\(Request ID.*", "", f"{what}: {text}")


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock on a file; the system releases it when the process ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
