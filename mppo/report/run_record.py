"""What a run writes into its folder: its events, its status, and how they are read back."""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import mppo
from mppo.dumps.step_dump import StepDump, dumped_steps, read_header_of
from mppo.report.files import EVENTS, METRICS, RECIPE, REPORT, SAMPLES, STATUS
from mppo.report.history import read_history
from mppo.safety.disk import naming, replace_text
from mppo.safety.foreign_text import json_line
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_file, read_text

EventKind = Literal["start", "end", "died", "warning", "engine", "code"]


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, at a ``time`` in UTC (ISO 8601): "start" of a process of
    the run; its "end"; "died": it ended without one, which the next start finds; a "warning";
    "engine": a lost server; or "code": a start found other code under a key of the recipe."""

    kind: EventKind
    step: int | None
    text: str
    time: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )


def append_event(folder: Path, event: RunEvent) -> None:
    path = folder / EVENTS
    line = json_line(asdict(event)).encode() + b"\n"
    with naming(path), path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a process was killed while it wrote
                line = b"\n" + line
        file.write(line)


def read_events(folder: Path) -> list[RunEvent]:
    """The events in the order in which they happened; lines that are not events are ignored."""
    found: list[RunEvent] = []
    try:
        text = read_file(folder / EVENTS).decode(errors="replace")
    except (OSError, ValueError):
        return []
    for line in text.split("\n"):
        try:
            event = RunEvent(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        texts = isinstance(event.text, str) and isinstance(event.time, str)
        if texts and event.kind in get_args(EventKind) and type(event.step) in (int, type(None)):
            found.append(event)
    return found


_STATUS_BYTES = 1 << 16
"""Most bytes of a status."""
RunState = Literal["running", "finished", "stopped early", "failed"]


@dataclass(frozen=True)
class Status:
    """The state of a run, still "running" if it was killed: PPO steps that were done when the file
    was written, and the version of mppo that wrote it."""

    status: RunState
    step: int
    total_steps: int
    mppo: str = mppo.__version__


def write_status(folder: Path, status: Status) -> None:
    replace_text(folder / STATUS, f"{json.dumps(asdict(status))}\n")


def read_status(folder: Path) -> Status | None:
    """The status of the last run; None if there is no readable file."""
    try:
        found = Status(**json.loads(read_text(folder / STATUS, _STATUS_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_valid = type(found.step) is type(found.total_steps) is int
    return found if is_valid and found.status in get_args(RunState) else None


def finished_steps(folder: Path) -> int:
    """Steps of a finished run in a folder; 0 if there is none. Folders of older versions have no
    status.json; there the report is read."""
    status = read_status(folder)
    if status is not None:
        return status.step if status.status == "finished" else 0
    try:
        found = re.search(r"^Finished after (\d+) steps", read_text(folder / REPORT), re.M)
    except (OSError, ValueError):
        return 0
    return int(found[1]) if found else 0


_SAMPLES_BYTES = 1 << 30
"""Most bytes of a run's samples."""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run, each read when it is first asked for; InputError if one is damaged."""

    folder: Path

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of every logged step, with ``step``; numbers that were not finite are NaN."""
        path = self.folder / METRICS
        rows = read_history(path) if path.exists() else []
        return [{"step": step, **metrics} for step, metrics in rows]

    def frame(self) -> Any:
        """The metrics as a data frame of pandas, one row per step; InputError without pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise InputError("a data frame needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.metrics)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The samples of ``samples.jsonl``: step, prompt, response, score and more."""
        path = self.folder / SAMPLES
        if not path.exists():
            return []
        # the last line is incomplete or empty
        *lines, _ = read_file(path, _SAMPLES_BYTES).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise InputError(f"{path}: a line is not JSON: {error}") from error

    @cached_property
    def events(self) -> list[RunEvent]:
        """Starts, ends and warnings, in the order in which they happened."""
        return read_events(self.folder)

    @cached_property
    def status(self) -> Status | None:
        """State and steps of the run; None: it has not started."""
        return read_status(self.folder)

    @cached_property
    def dumps(self) -> dict[int, Path]:
        """Folders of the dumped steps (``trainer.dump_rollouts``), by step."""
        return dumped_steps(self.folder)

    def dump(self, step: int) -> StepDump:
        """The header of a dumped step, with a row for each sequence; InputError if there is no such
        dump, or it is damaged."""
        if step not in self.dumps:
            known = ", ".join(map(str, self.dumps)) or "none"
            raise InputError(f"{self.folder}: step {step} is not dumped; dumped steps: {known}")
        return read_header_of(self.dumps[step])


def read_run(path: str | Path) -> RunRecord:
    """Read what a run has written, possibly nothing yet; InputError if there is no such folder, or
    it holds other things than a run."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such run folder; give trainer.default_local_dir")
    files = (METRICS, RECIPE, SAMPLES, STATUS)
    if any(folder.iterdir()) and not any((folder / name).is_file() for name in files):
        why = f"is not a run folder: it has no {METRICS} and no {RECIPE}"
        raise InputError(f"{folder} {why}; give trainer.default_local_dir")
    return RunRecord(folder)
