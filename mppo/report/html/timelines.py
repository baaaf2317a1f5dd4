"""The recorded updates of a run (``trainer.timeline``) as the page draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mppo.dumps.step_dump import UNREADABLE
from mppo.report.files import TIMELINES
from mppo.report.history import evenly_spaced
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_text
from mppo.safety.redact import redact_text

_NEWEST = 2
_ROWS, _EVENTS = 64, 50_000
"""Most rows, and about the most events, of the plan and of the measurement; of more ranks, evenly
spaced ones are shown. 64 rows of 700 events make about 0.5 MB."""

Plain = dict[str, Any]


def recorded_steps(folder: Path) -> dict[int, Path]:
    """The files of the recorded updates by step, ascending."""
    found = {}
    for path in (folder / TIMELINES).glob("step_*.json"):
        number = path.stem.removeprefix("step_")
        if number.isascii() and number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def newest_timelines(folder: Path, last: int) -> list[Plain]:
    """The newest recorded updates up to a step, each with its plan; or why one cannot be read.

    Each has ``unit``, the seconds of a tick, ``actions`` (kind, role, mini-batch, micro-batch,
    chunk) and ``panels``. A row of a panel is its number and a flat list with three integers per
    event: index of its action, ticks since the end of the event before, and its own ticks.
    """
    found = []
    steps = [each for each in recorded_steps(folder).items() if each[0] <= last]
    for step, path in steps[-_NEWEST:]:
        try:
            state = path.stat()
            found.append({"step": step, **_timeline(path, state.st_mtime_ns, state.st_size)})
        except UNREADABLE as error:
            why = redact_text(" ".join(str(error).split()))
            found.append({"step": step, "error": f"the timeline cannot be read: {why}"})
    return found


@lru_cache(maxsize=2 * _NEWEST)  # a browser loads a served page every few seconds
def _timeline(path: Path, modified: int, size: int) -> Plain:
    """A recorded update. The nanoseconds of its last change and its size make the cache read a new
    file. A file that no run wrote raises ValueError, LookupError, TypeError, OSError,
    ArithmeticError or RecursionError."""
    from mppo.pipeline.timeline import idle_share, read_trace  # imports torch

    trace = json.loads(read_text(path))
    measured = read_trace(trace)
    if not any(measured):
        raise InputError("it has no event")
    parts = [("measured", "rank", measured, 1.0)]
    schedule = ""
    if "plan" in trace:
        schedule = redact_text(str(trace["plan"]["schedule"]))
        planned = read_trace(trace["plan"])
        parts.insert(0, ("plan", "stage", planned, _compute(measured) / _compute(planned)))
    span = max(event.end * scale for *_, rows, scale in parts for row in rows for event in row)
    unit = 10.0 ** (math.floor(math.log10(span)) - 5)
    actions: dict[tuple[Any, ...], int] = {}
    panels = [
        {
            "name": name,
            "row": row_name,
            "of": len(rows),
            "idle": round(idle_share(rows), 4),
            "rows": [
                [number, _ticks(rows[number], scale / unit, actions)] for number in _shown(rows)
            ],
        }
        for name, row_name, rows, scale in parts
    ]
    shown = {role: redact_text(role) for role in {action[1] for action in actions}}
    named = [(kind, shown[role], *numbers) for kind, role, *numbers in actions]
    return {"schedule": schedule, "unit": unit, "actions": named, "panels": panels}


def _compute(rows: Sequence[Sequence[Any]]) -> float:
    """Mean time of a row's forward and backward passes, which puts the plan on the measured scale:
    a plan counts in forward passes of one role."""
    from mppo.pipeline.actions import COMPUTE

    total = sum(e.end - e.start for row in rows for e in row if e.action.kind in COMPUTE)
    return total / len(rows)


def _shown(rows: Sequence[Sequence[Any]]) -> list[int]:
    """Evenly spaced rows: pipeline stages are consecutive blocks of ranks, so each has some."""
    events = sum(map(len, rows))
    return evenly_spaced(len(rows), max(min(_ROWS, _EVENTS * len(rows) // events), 1))


def _ticks(row: Sequence[Any], scale: float, actions: dict[tuple[Any, ...], int]) -> list[int]:
    """The events of a row; new actions are added to ``actions``."""
    from mppo.pipeline.timeline import SHOWN

    found, before = [], 0
    for event in row:
        action = event.action
        numbers = (action.mini_batch, action.micro_batch, action.chunk)
        if action.kind not in SHOWN or any(type(number) is not int for number in numbers):
            raise InputError(f"has an event of an unknown action ({action.kind})")
        key = (action.kind, str(action.role), *numbers)
        start, end = round(event.start * scale), round(event.end * scale)
        found += [actions.setdefault(key, len(actions)), start - before, end - start]
        before = end
    return found
