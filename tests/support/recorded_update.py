"""Recorded updates as ``trainer.timeline`` writes them, made of a schedule's plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.timeline import Event, planned_events, update_trace

WORK = (RoleWork("critic", (2, 2), 1.0, 2.0), RoleWork("actor", (3,), 1.5, 2.5))
SECONDS = 0.025
"""Of a unit of the plan."""
CLOCK = 7.0
"""Seconds at which the measurement begins."""


def schedule_of(stages: int = 3, work: Sequence[RoleWork] = WORK) -> Schedule:
    """A flush-free schedule."""
    return make_schedule("flush_free", tuple(work), stages)


def measured(schedule: Schedule, ranks: int | None = None) -> list[list[Event]]:
    """The plan as if carried out, with an optimizer step at the end, on some ranks."""
    plan = planned_events(schedule)
    end = max(event.end for row in plan for event in row)
    step = Event(Action("step", schedule.roles[-1].name, 0), end, 0.0, end + 1.0)
    return [
        [
            Event(
                e.action, CLOCK + SECONDS * e.start, SECONDS * e.waited, CLOCK + SECONDS * e.end
            )
            for e in (*plan[i % len(plan)], step)
        ]
        for i in range(len(plan) if ranks is None else ranks)
    ]  # fmt: skip


def recorded_update(schedule: Schedule, ranks: int | None = None) -> dict[str, Any]:
    """The trace of plan and measurement."""
    return update_trace(schedule, measured(schedule, ranks))


def write_timeline(run: Path, step: int, trace: object) -> Path:
    """Write a trace (or a text) where a run writes it."""
    path = run / "timeline" / f"step_{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    return path
