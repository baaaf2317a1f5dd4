"""SwanLab."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from pathlib import Path

from mppo.report.console import SampleRow
from mppo.report.history import Metrics
from mppo.report.summary import markdown_table
from mppo.report.trackers.tracker import (
    SAMPLES,
    TrackedRun,
    import_tracker,
    refused,
)

_ID_CHARACTERS, _ID_LENGTH = string.ascii_lowercase + string.digits, 21


class SwanLab:
    """A SwanLab experiment (ConfigError if it cannot start); its API key comes from the
    environment, never from the recipe.

    With ``SWANLAB_MODE=offline`` it is kept under ``<run>/swanlab``. The package would also send
    the command line, the Git remote and everything printed, which may hold secrets; that is off.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._swanlab = swanlab = import_tracker("swanlab")
        identity = run.known_id("swanlab") or _new_id()
        try:
            self._run = swanlab.init(
                project=run.project,
                name=run.name,
                config=run.recipe,
                log_dir=str(run.folder / "swanlab"),
                id=identity,
                resume="allow",
                settings=swanlab.Settings(
                    interactive=False,
                    probe={"runtime": False, "git": False},
                    terminal={"proxy_type": "none"},
                ),
            )
        except (ValueError, OSError, RuntimeError, swanlab.exceptions.AuthenticationError) as error:
            raise refused("swanlab", error, "SWANLAB_MODE=offline") from error
        run.keep_id("swanlab", identity)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = self._swanlab.Text("\n".join(markdown_table([row.cells() for row in rows])))
        self._run.log({SAMPLES: text}, step=step)

    def picture(self, step: int, path: Path) -> None:
        self._run.log({path.stem: self._swanlab.Image(str(path))}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
