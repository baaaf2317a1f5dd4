"""status.json in the run folder: a run's progress and end, for the next start and for scripts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import mppo
from mppo.safety.disk import replace_text
from mppo.safety.input_files import read_text

FILE = "status.json"
REPORT = "report.md"
_LIMIT = 1 << 16
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
    replace_text(folder / FILE, f"{json.dumps(asdict(status))}\n")


def read_status(folder: Path) -> Status | None:
    """The status of the last run; None if there is no readable file."""
    try:
        found = Status(**json.loads(read_text(folder / FILE, _LIMIT)))
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
