"""What a run has written into its folder, read back."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mppo.dumps.step_dump import StepDump, dumped_steps, read_header_of
from mppo.report.events import RunEvent, read_events
from mppo.report.files import METRICS, RECIPE, SAMPLES
from mppo.report.history import read_history
from mppo.report.status import FILE as STATUS
from mppo.report.status import Status, read_status
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_file

_LIMIT = 1 << 30
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
        *lines, _ = read_file(path, _LIMIT).split(b"\n")  # the last one is incomplete or empty
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
