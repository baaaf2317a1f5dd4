"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from mppo.report.console import SAMPLE_COLUMNS, SampleRow
from mppo.report.history import Metrics
from mppo.report.trackers.tracker import (
    SAMPLES,
    TrackedRun,
    import_tracker,
    refused,
)


class WandB:
    """A Weights & Biases run (ConfigError if it cannot start); its API key comes from the
    environment, never from the recipe. The package would also send the command line, the Git remote
    and everything printed, which may hold secrets; that is turned off."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = wandb = import_tracker("wandb")
        identity = run.known_id("wandb") or uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                dir=str(run.folder),
                config=run.recipe,
                id=identity,
                resume="allow",
                settings=wandb.Settings(console="off", disable_git=True, x_disable_meta=True),
            )
        except wandb.errors.Error as error:
            raise refused("wandb", error, "WANDB_MODE=offline") from error
        run.keep_id("wandb", identity)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._wandb.Table(
            columns=list(SAMPLE_COLUMNS), data=[list(row.cells()) for row in rows]
        )
        self._run.log({SAMPLES: table}, step=step)

    def picture(self, step: int, path: Path) -> None:
        self._run.log({path.stem: self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()
