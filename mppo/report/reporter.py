"""A run's output: console, files, trackers, and the final report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mppo.dumps.stale import mark_stale, remove_stale
from mppo.dumps.step_dump import FOLDER as ROLLOUTS
from mppo.recipe.document import block_yaml
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.code_files import keep_code
from mppo.report.console import SampleRow, StepConsole
from mppo.report.files import (
    CALIBRATION,
    EVENTS,
    EXPERT_LOAD,
    METRICS,
    NONFINITE,
    PAGE,
    PLOT,
    RECIPE,
    REPORT,
    SAMPLES,
)
from mppo.report.history import History, Metrics, metric_name, read_history
from mppo.report.html.page import write_page
from mppo.report.html.timelines import recorded_steps
from mppo.report.pictures import plot_calibration, plot_expert_load, plot_run
from mppo.report.run_record import (
    EventKind,
    RunEvent,
    RunState,
    Status,
    append_event,
    read_status,
    write_status,
)
from mppo.report.summary import run_report
from mppo.report.trackers.services import check_trackers, open_trackers
from mppo.report.trackers.tracker import TrackedRun, Tracker
from mppo.report.warning_rules import course, current_warnings
from mppo.safety.disk import flush, naming, replace_bytes, replace_text
from mppo.safety.foreign_text import json_line
from mppo.safety.redact import redact, redact_text


class Reporter:
    """Writes ``recipe.yaml``, ``status.json``, ``metrics.jsonl``, ``samples.jsonl``,
    ``events.jsonl``, ``reward_kl.png``, ``report.md``, ``report.html`` and the code that the recipe
    names into the run folder, and prints to the console.

    Nothing is written before ``start``, so a run that does not start leaves an earlier run's report
    as it is. Secrets in the recipe are replaced. Only the main rank writes; on other ranks every
    method does nothing. ConfigError: a tracker's package is not installed.
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
        self._name = redact_text(f"{trainer.project_name}/{trainer.experiment_name}")
        self._samples: dict[int, Sequence[SampleRow]] = {}
        self._began = time.monotonic()
        self._started, self._done = False, 0
        check_trackers(trainer)
        if not is_main:
            return
        self._trainer = trainer
        self._plain, self._recipe = recipe_dump, redact(recipe_dump)
        self._trackers: Sequence[Tracker] = ()
        self._console = (
            StepConsole(total_steps, style=trainer.console) if "console" in trainer.logger else None
        )
        self._warned: set[str] = set()
        self._stale: dict[int, Path] = {}
        self._history = History(self.run_dir / METRICS if "jsonl" in trainer.logger else None)

    def start(self, step: int) -> None:
        """Start to write and to time, with ``step`` PPO steps done.

        Metrics, samples and timelines of later steps in the folder belong to work that was lost,
        and are dropped; dumps of it are marked stale until the run has passed their steps.
        ConfigError: the folder cannot be written. ValueError: a line of metrics.jsonl is not valid.
        """
        if not self.is_main:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            _note_death(self.run_dir)
            self._history.start(step)
            _keep_samples(self.run_dir / SAMPLES, step)
            self._stale = mark_stale(self.run_dir / ROLLOUTS, step)
            mark_stale(self.run_dir / NONFINITE, step)
            for path in (p for n, p in recorded_steps(self.run_dir).items() if n > step):
                path.unlink()
            replace_text(self.run_dir / RECIPE, block_yaml(self._recipe))
            changed = keep_code(self.run_dir, self._plain, step)
            write_status(self.run_dir, Status("running", step, self.total_steps))
        except OSError as error:
            why = f"{error.filename or self.run_dir} cannot be written ({error.strerror})"
            fix = "free disk space and make the folder writable, or give a folder on another disk"
            issue = ConfigIssue("trainer.default_local_dir", str(self.run_dir), why, fix)
            raise ConfigError([issue], "run folder") from error
        project, name = (
            redact_text(text)
            for text in (self._trainer.project_name, self._trainer.experiment_name)
        )
        tracked = TrackedRun(self.run_dir, project, name, self._recipe, step)
        self._trackers = open_trackers(self._trainer, tracked, self._tracker_line)
        self._started, self._done = True, step
        if changed:
            self.event("code", step, f"the code of {', '.join(changed)} has changed")
        if self._console:
            self._console.start(step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step, after ``start``; step 0 is validation before the first. Names
        are cleaned (``metric_name``) for all files and trackers."""
        if not self.is_main:
            return
        metrics = {metric_name(name): value for name, value in metrics.items()}
        self._history.append(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._console:
            self._console.step(step, metrics)
        remove_stale([self._stale.pop(passed) for passed in list(self._stale) if passed <= step])
        if step:
            self._warn(step)

    def _warn(self, step: int) -> None:
        """Print the warnings that this step raises; one that lasts is printed once."""
        rows = self._history.rows
        now = current_warnings(course(rows, len(rows)))
        for warning in now:
            if warning.name not in self._warned:
                self.event("warning", step, str(warning))
                self.line(f"step {step}: warning: {warning}")
        self._warned = {warning.name for warning in now}
        if self._console:
            self._console.warnings([str(warning) for warning in now])

    def event(self, kind: EventKind, step: int, text: str) -> None:
        """Append an event to events.jsonl; secrets are replaced."""
        if self.is_main:
            append_event(self.run_dir, RunEvent(kind, step, redact_text(text)))

    def line(self, text: str) -> None:
        """Print one line on the console, above the live display."""
        if self.is_main and self._console:
            self._console.print_line(text)

    def _tracker_line(self, text: str) -> None:
        self.event("warning", self._last_step, text)
        self.line(f"warning: {text}")

    def flush(self) -> None:
        """Flush metrics, samples and events to disk (OSError if it failed): what a checkpoint's
        steps wrote must not be lost if the machine loses power after the checkpoint is complete."""
        if not self.is_main or not self._started:
            return
        for path in (self.run_dir / name for name in (METRICS, SAMPLES, EVENTS)):
            if path.is_file():
                flush(path)
        flush(self.run_dir)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Print completions as a table, append them to samples.jsonl, and pass them to trackers,
        with secrets and halves of surrogate pairs replaced."""
        if not self.is_main or not rows:
            return
        rows = [row.cleaned() for row in rows]
        self._samples[step] = rows
        path = self.run_dir / SAMPLES
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), path.open("a") as file:
            for row in rows:
                file.write(json_line({"step": step, **row._asdict()}) + "\n")
        for tracker in self._trackers:
            tracker.samples(step, rows)
        if self._console:
            self._console.samples(step, rows)

    def close(self) -> None:
        """Write plots and report, and close progress bar and trackers; idempotent, and nothing
        without ``start``. The run has failed while an exception propagates, else it has stopped
        early or finished. OSError: the report cannot be written; while another exception
        propagates, only a line is printed."""
        if not self._started:
            return
        self._started = False
        failing = sys.exc_info()[0] is not None
        status: RunState = "failed" if failing else "stopped early"
        if not failing and self._last_step >= self.total_steps:
            status = "finished"
        if self._console:
            self._console.stop()
        try:
            self._write_report(status)
        except OSError as error:
            if not failing:
                raise
            self.line(f"the report cannot be written: {error}")
        else:
            self.line(f"{status}: {self.run_dir / PAGE}")
            drawn = [self.run_dir / name for name in (PLOT, EXPERT_LOAD, CALIBRATION)]
            for tracker in self._trackers:
                for path in filter(Path.is_file, drawn):
                    tracker.picture(self._last_step, path)
        finally:
            for tracker in self._trackers:
                tracker.close()

    def _write_report(self, status: RunState) -> None:
        plot_run(self._history, self.run_dir / PLOT, self._name)
        plot_expert_load(self._history, self.run_dir / EXPERT_LOAD, self._name)
        plot_calibration(self._history, self.run_dir / CALIBRATION, self._name)
        seconds, shown = time.monotonic() - self._began, (self._samples, self._recipe)
        report = run_report(self._name, status, seconds, self._history, *shown)
        replace_text(self.run_dir / REPORT, report)
        self.event("end", self._last_step, status)
        write_status(self.run_dir, Status(status, self._last_step, self.total_steps))
        write_page(self.run_dir, self._history)

    @property
    def _last_step(self) -> int:
        return self._history.rows[-1][0] if self._history.rows else self._done


def _note_death(folder: Path) -> None:
    """Write the event of an earlier start that never ended, with the last step that it logged."""
    status, path = read_status(folder), folder / METRICS
    if status is None or status.status != "running":
        return
    logged: list[int] = []
    with suppress(ValueError, FileNotFoundError):  # a run that logs no jsonl needs no valid file
        logged = [step for step, _ in read_history(path)]
    text = "ended without a report: killed, or the machine was lost"
    append_event(folder, RunEvent("died", max(logged, default=status.step), text))


def _keep_samples(path: Path, done: int) -> None:
    """Drop the samples of steps after ``done``, and an incomplete last line."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        replace_bytes(path, b"".join(line for line in lines if _is_kept(line, done)))


def _is_kept(line: bytes, done: int) -> bool:
    """Whether a line is a sample of the first ``done`` steps; true for a line without a step."""
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= done
    except (ValueError, KeyError, TypeError):
        return True
