"""Checks that the trackers in ``trainer.logger`` are installed and set up."""

from __future__ import annotations

import netrc
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from mppo.config.errors import ConfigIssue

PACKAGES = ("tensorboard", "wandb")
KEY = "trainer.logger"
_WANDB_URL = "https://api.wandb.ai"


def tracker_issues(
    loggers: Sequence[str],
    environ: Mapping[str, str],
    is_installed: Callable[[str], object] = find_spec,
) -> Iterator[ConfigIssue]:
    """Issues that would keep a tracker from working.

    Args:
        loggers: ``trainer.logger``.
        environ: the environment.
        is_installed: finds a package by name; None if it is not installed.
    """
    for name in PACKAGES:
        if name in loggers and not is_installed(name):
            fix = f'pip install "mppo[{name}]", or remove it from trainer.logger'
            yield ConfigIssue(KEY, name, f"the package {name} is not installed", fix)
        elif name == "wandb" and name in loggers and not _has_key(environ):
            why = "Weights & Biases has no API key on this machine"
            fix = (
                "export WANDB_API_KEY, run `wandb login`, set WANDB_MODE=offline, or remove "
                "wandb from trainer.logger"
            )
            yield ConfigIssue(KEY, name, why, fix)


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
