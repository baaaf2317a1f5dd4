"""Download of models from the Hugging Face Hub; runs only with ``model.hub: true``."""

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


def file_patterns(weights: bool, trust_remote_code: bool) -> tuple[str, ...]:
    """Return the patterns of the files to download.

    Args:
        weights: whether to download the weights, not only config.json and tokenizer.
        trust_remote_code: whether to download the model's Python code.
    """
    parts = (CONFIG_FILES, WEIGHT_FILES if weights else (), CODE_FILES if trust_remote_code else ())
    return tuple(pattern for part in parts for pattern in part)


def fetch_model(name: str, weights: bool, trust_remote_code: bool) -> Path:
    """Return the folder of a Hub model in the Hub's cache; download it if it is not there.

    If several processes of a node call this, one downloads and the others wait for it.

    Args:
        name: ``owner/model``.
        weights, trust_remote_code: as for ``file_patterns``.

    Raises:
        ConfigError: the Hub cannot be reached, or has no such model.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    try:
        with _one_at_a_time(cache / f"mppo--{name.replace('/', '--')}.lock"):
            folder = snapshot_download(
                name,
                allow_patterns=list(file_patterns(weights, trust_remote_code)),
                ignore_patterns=list(LEFT_OUT),
            )
    except (OSError, ValueError) as error:
        fix = (
            "check the name; if this host cannot reach the Hub, download the model elsewhere and "
            "name its folder; a gated model needs HF_TOKEN"
        )
        raise ConfigError([ConfigIssue("model.path", name, _why(error), fix)]) from error
    return Path(folder)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return re.sub(
        r"\s*\(Request ID.*", "", f"cannot be downloaded from the Hugging Face Hub: {text}"
    )


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock on a file; the system releases it when the process ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
