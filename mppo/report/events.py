"""Events of a run in events.jsonl: starts, ends and warnings, over all starts in the folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, get_args

from mppo.safety.disk import naming

FILE = "events.jsonl"
EventKind = Literal["start", "end", "warning", "engine"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run.

    Args:
        kind: "start" of a process of the run, its "end", a "warning", or "engine": a lost server.
        step: PPO steps that were done.
        text: what happened.
        time: UTC, ISO 8601.
    """

    kind: EventKind
    step: int
    text: str
    time: str = field(default_factory=_now)


def append_event(folder: Path, event: RunEvent) -> None:
    """Append an event to the run's file."""
    path = folder / FILE
    with naming(path), path.open("a") as file:
        file.write(json.dumps(asdict(event), ensure_ascii=False) + "\n")


def read_events(folder: Path) -> list[RunEvent]:
    """The events in the order in which they happened; lines that are not events are ignored."""
    path, found = folder / FILE, []
    if not path.is_file():
        return []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = RunEvent(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if event.kind in get_args(EventKind) and type(event.step) is int:
            found.append(event)
    return found
