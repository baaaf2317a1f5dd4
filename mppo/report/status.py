"""How far a run is and how it ended, in its folder as status.json: for the next start, and for
scripts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import mppo
from mppo.safety.disk import replace_text

FILE = "status.json"
REPORT = "report.md"
Word = Literal["running", "finished", "stopped early", "failed"]


@dataclass(frozen=True)
class Status:
    """The state of a run.

    Args:
        status: "running" also where the run was killed.
        step: the last PPO step that was done when this was written.
        total_steps: steps of the run.
        mppo: version that wrote it.
    """

    status: Word
    step: int
    total_steps: int
    mppo: str = mppo.__version__


def write_status(folder: Path, status: Status) -> None:
    """Write the file in one step."""
    replace_text(folder / FILE, f"{json.dumps(asdict(status))}\n")


def read_status(folder: Path) -> Status | None:
    """What the last run said; None where nothing does that can be read."""
    try:
        return Status(**json.loads((folder / FILE).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def finished_steps(folder: Path) -> int:
    """Steps of the run that has finished in a folder; 0 where none has.

    Before there was a status.json, only the report said so.
    """
    status = read_status(folder)
    if status is not None:
        return status.step if status.status == "finished" else 0
    try:
        found = re.search(r"^Finished after (\d+) steps", (folder / REPORT).read_text(), re.M)
    except (OSError, ValueError):
        return 0
    return int(found[1]) if found else 0
