"""Models of the Hugging Face Hub: by themselves never downloaded, with ``model.hub: true`` once."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mppo.config.errors import ConfigError, ConfigIssue

CONFIG_FILES = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "*.jinja")
WEIGHT_FILES = ("*.safetensors",)
CODE_FILES = ("*.py",)
LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Other forms of the same weights."""


def wanted_files(weights: bool, trust_remote_code: bool) -> tuple[str, ...]:
    """Patterns of the files that a model needs.

    Args:
        weights: whether its weights are needed, not only config.json and tokenizer.
        trust_remote_code: whether code that it ships may run.
    """
    parts = (CONFIG_FILES, WEIGHT_FILES if weights else (), CODE_FILES if trust_remote_code else ())
    return tuple(pattern for part in parts for pattern in part)


def fetch_model(name: str, weights: bool, trust_remote_code: bool) -> Path:
    """The folder of a model of the Hub, in the Hub's own cache; downloaded where it is not there.

    Many processes of a node may ask: one downloads, the others wait for it and find the files.

    Args:
        name: ``owner/model``.
        weights, trust_remote_code: as for ``wanted_files``.

    Raises:
        ConfigError: the Hub cannot be reached, or gives no such model.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    try:
        with _one_at_a_time(cache / f"mppo--{name.replace('/', '--')}.lock"):
            folder = snapshot_download(
                name,
                allow_patterns=list(wanted_files(weights, trust_remote_code)),
                ignore_patterns=list(LEFT_OUT),
            )
    except (OSError, ValueError) as error:
        fix = (
            "where the Hub cannot be reached, download the model elsewhere and name its folder; a "
            "model that asks for consent needs HF_TOKEN"
        )
        raise ConfigError([ConfigIssue("model.path", name, _why(error), fix)]) from error
    return Path(folder)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return re.sub(r"\s*\(Request ID.*", "", f"is not to be had from the Hugging Face Hub: {text}")


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a file's lock, which goes with the process."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
