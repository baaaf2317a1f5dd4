"""Start and end times of an update's actions, planned and measured, and their Perfetto trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mppo.parallel.measurement import StreamTimer
from mppo.pipeline.actions import COMPUTE, Action
from mppo.pipeline.schedule import Schedule

SHOWN = (*COMPUTE, "reduce", "norm", "step")
"""Kinds of actions that a timeline shows; the others take almost no time."""


Mark = Callable[[], Callable[[], float]]
"""Marks a point of the program; what it returns tells the point's time in seconds, later."""


@dataclass(frozen=True)
class Event:
    """The execution of an action on one rank; times in seconds (planned: the simulation's unit).
    ``waited`` is the wait for a message or for other ranks that followed its start."""

    action: Action
    start: float
    waited: float
    end: float


class Recorder:
    """Records the actions of this rank, without waiting for its device."""

    def __init__(self, mark: Mark | None = None) -> None:
        self._mark = StreamTimer().mark if mark is None else mark
        self._actions: list[tuple[Action, list[Callable[[], float]]]] = []

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if action.kind not in SHOWN:
            yield
            return
        marks = [self._mark()]
        self._actions.append((action, marks))
        yield
        marks.append(self._mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting time of the current action."""
        marks = self._actions[-1][1]
        marks.append(self._mark())
        yield
        marks.append(self._mark())

    @property
    def events(self) -> list[Event]:
        """The recorded actions, in order; read them when the device has completed them."""
        events = []
        for action, marks in self._actions:
            start, *waits, end = (time() for time in marks)
            waited = sum(waits[1::2]) - sum(waits[::2])
            events.append(Event(action, start, waited, end))
        return events


def planned_events(schedule: Schedule) -> list[list[Event]]:
    """The simulated passes of every stage as events; one list per stage."""
    simulation, rows = schedule.simulation, []
    units, costs = simulation.in_units, simulation.costs
    names = [role.name for role in schedule.roles]
    for stage in range(len(schedule.lists)):
        times: dict[Action, tuple[float, float]] = {}
        for n, entry in enumerate(schedule.stream.entries):
            numbers = names[entry.role], entry.mini_batch, entry.micro_batch, entry.chunk
            for kind, starts, cost in zip(
                COMPUTE,
                (simulation.forward_start, simulation.backward_start),
                (costs.forward, costs.backward),
                strict=True,
            ):
                start = starts[stage][n]
                end = start + cost[entry.role][stage]
                times[Action(kind, *numbers)] = units(start), units(end)
        clock, row = 0.0, []
        for action in schedule.lists[stage]:
            if action in times:
                start, end = times[action]
                row.append(Event(action, clock, start - clock, end))
                clock = end
        rows.append(row)
    return rows


def idle_share(rows: Sequence[Sequence[Event]]) -> float:
    """Share of the ranks' time between first start and last end without work, 0 to 1."""
    events = [event for row in rows for event in row]
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(e.end - e.start - e.waited for e in events)
    return 1 - busy / (span * len(rows))


def chrome_trace(rows: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Convert events to Chrome's trace format for Perfetto: one row per rank, times in µs."""
    origin = min(event.start for row in rows for event in row)
    found = []
    for rank, row in enumerate(rows):
        name = {"name": f"rank {rank}"}
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        for event in row:
            action = event.action
            title = f"{action.kind} {action.role} {action.mini_batch}"
            begin = event.start + event.waited
            if action.kind in COMPUTE:
                title += f".{action.micro_batch}"
                if action.chunk:
                    title += f" chunk {action.chunk}"
            for label, start, end in (
                ("waiting", event.start, begin),
                (title, begin, event.end),
            ):
                if end > start:
                    found.append(
                        {
                            "ph": "X",
                            "name": label,
                            "cat": "waiting" if label == "waiting" else action.role,
                            "args": action._asdict(),
                            "pid": rank,
                            "tid": 0,
                            "ts": round((start - origin) * 1e6, 3),
                            "dur": round((end - start) * 1e6, 3),
                        }
                    )
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def update_trace(schedule: Schedule, rows: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Convert a recorded update: the trace of its ranks, which Perfetto shows, and under ``plan``
    the kind of the schedule and the trace of the planned events of every stage."""
    plan = {"schedule": schedule.kind, **chrome_trace(planned_events(schedule))}
    return {**chrome_trace(rows), "plan": plan}


def read_trace(trace: Mapping[str, Any]) -> list[list[Event]]:
    """Convert a trace of ``chrome_trace`` back to the events of every rank, waits apart."""
    rows: dict[int, list[Event]] = {}
    for entry in trace["traceEvents"]:
        row = rows.setdefault(entry["pid"], [])
        if entry["ph"] == "X" and entry["cat"] != "waiting":
            start = entry["ts"] / 1e6
            row.append(Event(Action(**entry["args"]), start, 0.0, start + entry["dur"] / 1e6))
    return [rows[rank] for rank in sorted(rows)]
