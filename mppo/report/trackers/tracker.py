"""What a tracker does, and the identity of a run in it, which a resumed run keeps."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.trackers import EXTRAS, KEY
from mppo.report.console import SampleRow
from mppo.report.files import TRACKER_IDS
from mppo.report.history import Metrics
from mppo.safety.disk import replace_text
from mppo.safety.redact import redact_text

SAMPLES = "samples"


class Tracker(Protocol):
    """A destination for metrics and samples besides the run folder."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log a table of responses, without secrets."""
        ...

    def picture(self, step: int, path: Path) -> None:
        """Log an image file, under its name without the suffix."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it, without secrets; with ``done`` PPO steps above 0 it is resumed."""

    folder: Path
    project: str
    name: str
    recipe: dict[str, Any]
    done: int

    def known_id(self, tracker: str) -> str | None:
        """The run's identity in a tracker; None if it is new there."""
        return self._ids().get(tracker) if self.done else None

    def keep_id(self, tracker: str, identity: str) -> None:
        replace_text(
            self.folder / TRACKER_IDS, f"{json.dumps({**self._ids(), tracker: identity})}\n"
        )

    def _ids(self) -> dict[str, str]:
        try:
            ids = json.loads((self.folder / TRACKER_IDS).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        found = ids if isinstance(ids, dict) else {}
        return {name: one for name, one in found.items() if isinstance(one, str)}


def import_tracker(package: str) -> Any:
    """Import the module of a tracker named in ``trainer.logger``; ConfigError if it is missing."""
    try:
        return importlib.import_module(EXTRAS[package])
    except ModuleNotFoundError as error:
        why = f"the package {package} is not installed"
        fix = f'pip install "mppo[{package}]", or remove it from {KEY}'
        raise ConfigError([ConfigIssue(KEY, package, why, fix)]) from error


def refused(package: str, error: Exception, offline: str | None = None) -> ConfigError:
    """The error for a tracker that did not start; ``offline``: how to use it without its server."""
    why = redact_text(" ".join(str(error).split()))
    or_offline = f", set {offline}" if offline else ""
    fix = f"correct that{or_offline}, or remove {package} from {KEY}"
    return ConfigError([ConfigIssue(KEY, package, why, fix)])
