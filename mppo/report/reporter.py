"""Everything a run tells: console, files, trackers, and the report at its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mppo.config.schema import TrainerConfig
from mppo.report.console import SampleRow, StepConsole
from mppo.report.expert_load import plot_expert_load
from mppo.report.history import History, Metrics
from mppo.report.plot import plot_run
from mppo.report.redact import redact
from mppo.report.summary import run_report
from mppo.report.trackers import open_trackers


class Reporter:
    """Writes ``recipe.yaml``, ``metrics.jsonl``, ``samples.jsonl``, ``reward_kl.png`` and
    ``report.md`` into the run's folder, and talks to the console.

    Secrets in the recipe are replaced before anything is written. Only the main rank writes; on
    the others every method does nothing.

    Args:
        run_dir: the run's folder; made where missing.
        trainer: ``logger``, ``project_name`` and ``experiment_name`` are read.
        recipe_dump: the resolved recipe as plain values.
        total_steps: length of the run, for the bar and the ETA.
        is_main: whether this rank is the one that reports.

    Raises:
        ConfigError: a logger's package is not installed (on the main rank).
    """

    def __init__(
        self,
        run_dir: str | Path,
        trainer: TrainerConfig,
        recipe_dump: dict[str, Any],
        total_steps: int,
        is_main: bool,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.total_steps = total_steps
        self.is_main = is_main
        self._name = f"{trainer.project_name}/{trainer.experiment_name}"
        self._samples: dict[int, Sequence[SampleRow]] = {}
        self._began = time.monotonic()
        self._closed = not is_main
        if not is_main:
            return
        self._recipe = redact(recipe_dump)
        self._trackers = open_trackers(self.run_dir, trainer, self._recipe)
        self._console = StepConsole(total_steps) if "console" in trainer.logger else None
        jsonl = "jsonl" in trainer.logger
        self._history = History(self.run_dir / "metrics.jsonl" if jsonl else None)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        recipe_text = yaml.safe_dump(self._recipe, sort_keys=False)
        (self.run_dir / "recipe.yaml").write_text(recipe_text)

    def start(self, step: int) -> None:
        """Show the bar and begin timing, ``step`` steps being done already."""
        if self.is_main and self._console:
            self._console.start(step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Numbers of one finished step; steps count from 1, 0 is before the first.

        ``start`` comes before.
        """
        if not self.is_main:
            return
        self._history.append(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._console:
            self._console.step(step, metrics)

    def line(self, text: str) -> None:
        """One line on the console, above the bar."""
        if self.is_main and self._console:
            self._console.print_line(text)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Completions: table on the console, and samples.jsonl."""
        if not self.is_main or not rows:
            return
        self._samples[step] = rows
        with (self.run_dir / "samples.jsonl").open("a") as file:
            for row in rows:
                file.write(json.dumps({"step": step, **row._asdict()}, ensure_ascii=False) + "\n")
        if self._console:
            self._console.samples(step, rows)

    def close(self, status: str | None = None) -> None:
        """Write plot and report, and let go of terminal and trackers. Idempotent.

        Args:
            status: how the run ended; by default "failed" while an exception is on its way,
                "stopped early" before the last step, and "finished" otherwise.
        """
        if self._closed:
            return
        self._closed = True
        status = status or self._status()
        if self._console:
            self._console.stop()
        for tracker in self._trackers:
            tracker.close()
        plot_run(self._history, self.run_dir / "reward_kl.png", self._name)
        plot_expert_load(self._history, self.run_dir / "expert_load.png", self._name)
        report = run_report(
            self._name,
            status,
            time.monotonic() - self._began,
            self._history,
            self._samples,
            self._recipe,
        )
        (self.run_dir / "report.md").write_text(report)
        self.line(f"{status}: {self.run_dir / 'report.md'}")

    def _status(self) -> str:
        if sys.exc_info()[0] is not None:
            return "failed"
        last_step = self._history.rows[-1][0] if self._history.rows else 0
        return "finished" if last_step >= self.total_steps else "stopped early"
