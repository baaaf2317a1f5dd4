"""Events of a run in events.jsonl: starts, ends and warnings, over all starts in the folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, get_args

from mppo.safety.disk import naming
from mppo.safety.foreign_text import json_line
from mppo.safety.input_files import read_file

FILE = "events.jsonl"
EventKind = Literal["start", "end", "died", "warning", "engine", "code"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run.

    Args:
        kind: "start" of a process of the run; its "end"; "died": it ended without one, which the
            next start finds; a "warning"; "engine": a lost server; or "code": a start found other
            code under a key of the recipe.
        time: UTC, ISO 8601.
    """

    kind: EventKind
    step: int | None
    text: str
    time: str = field(default_factory=_now)


def append_event(folder: Path, event: RunEvent) -> None:
    path = folder / FILE
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
        text = read_file(folder / FILE).decode(errors="replace")
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
