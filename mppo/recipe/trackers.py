"""Checks that the trackers in ``trainer.logger`` are installed and set up."""

from __future__ import annotations

import netrc
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from mppo.recipe.errors import ConfigIssue

EXTRAS = {
    "tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow",
    "swanlab": "swanlab",
}  # fmt: skip
"""The module of each tracker; its package and its extra have the tracker's name."""
KEY = "trainer.logger"
_WANDB_URL = "https://api.wandb.ai"


def tracker_issues(
    loggers: Sequence[str],
    environ: Mapping[str, str],
    is_installed: Callable[[str], object] = find_spec,
) -> Iterator[ConfigIssue]:
    """Issues that would keep a tracker of ``trainer.logger`` from working."""
    for name in EXTRAS:
        if name in loggers and not is_installed(name):
            fix = f'pip install "mppo[{name}]", or remove it from trainer.logger'
            yield ConfigIssue(KEY, name, f"the package {name} is not installed", fix)
        elif name == "wandb" and name in loggers and not _has_key(environ):
            yield _without_key(name, "Weights & Biases", "WANDB")
        elif name == "swanlab" and name in loggers and not _has_swanlab_key(environ):
            yield _without_key(name, "SwanLab", "SWANLAB")


def _without_key(name: str, title: str, prefix: str) -> ConfigIssue:
    fix = (
        f"export {prefix}_API_KEY, run `{name} login`, set {prefix}_MODE=offline, or remove "
        f"{name} from {KEY}"
    )
    return ConfigIssue(KEY, name, f"{title} has no API key on this machine", fix)


def _has_swanlab_key(environ: Mapping[str, str]) -> bool:
    """Whether SwanLab finds an API key in the places it documents, or its mode needs none."""
    mode = environ.get("SWANLAB_MODE")
    if environ.get("SWANLAB_API_KEY") or mode in ("offline", "local", "disabled"):
        return True
    home = Path(environ.get("HOME", "~")).expanduser() / ".swanlab"
    own = environ.get("SWANLAB_ROOT") or environ.get("SWANLAB_SAVE_DIR") or home
    return any((Path(folder) / ".netrc").is_file() for folder in (own, ".swanlab"))


def _has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb finds an API key in the places it documents, or its mode needs none."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in ("offline", "disabled"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", _WANDB_URL)).hostname
    file = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return bool(host) and netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
