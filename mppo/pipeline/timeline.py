"""When the actions of an update began and ended: as planned, as measured, and for Perfetto."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mppo.parallel import device
from mppo.pipeline.actions import COMPUTE, Action
from mppo.pipeline.schedule import Schedule

SHOWN = (*COMPUTE, "reduce", "norm", "step")
"""Kinds of actions that take a stage's time."""


@dataclass(frozen=True)
class Event:
    """An action of one rank.

    Args:
        action: what it did.
        start: when the rank came to it, in seconds (the simulation's unit in a plan).
        waited: how long it then waited for a message or for other ranks.
        end: when it was done.
    """

    action: Action
    start: float
    waited: float
    end: float


class Recorder:
    """Notes the actions of this rank; the device is empty between them, which takes some time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.events: list[Event] = []
        self._clock, self._waited = clock, 0.0

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Note an action that runs inside."""
        start, self._waited = self._clock(), 0.0
        yield
        device.synchronize()
        if action.kind in SHOWN:
            self.events.append(Event(action, start, self._waited, self._clock()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the action waits inside."""
        start = self._clock()
        yield
        device.synchronize()
        self._waited += self._clock() - start


def planned_events(schedule: Schedule) -> list[list[Event]]:
    """What the simulation says of every stage: passes and optimizer steps that take time."""
    simulation, rows = schedule.simulation, []
    for stage in range(len(schedule.lists)):
        clock, row = 0.0, []
        starts: dict[Action, float] = {}
        for n, entry in enumerate(schedule.stream):
            numbers = schedule.roles[entry.role].name, entry.mini_batch, entry.micro_batch
            starts[Action("forward", *numbers)] = simulation.forward_start[stage][n]
            starts[Action("backward", *numbers)] = simulation.backward_start[stage][n]
        costs = {role.name: role.costs(len(schedule.lists)) for role in schedule.roles}
        for action in schedule.lists[stage]:
            if action in starts:
                cost = costs[action.role][COMPUTE.index(action.kind)][stage]
                row.append(Event(action, clock, starts[action] - clock, starts[action] + cost))
                clock = starts[action] + cost
        rows.append(row)
    return rows


def idle_share(rows: Sequence[Sequence[Event]]) -> float:
    """Share of the ranks' time, from the first start to the last end, in which they wait."""
    events = [event for row in rows for event in row]
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(e.end - e.start - e.waited for e in events)
    return 1 - busy / (span * len(rows))


def chrome_trace(rows: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """The format of Chrome's and Perfetto's trace viewers; one line per rank, times in us."""
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
                            "pid": rank,
                            "tid": 0,
                            "ts": round((start - origin) * 1e6, 3),
                            "dur": round((end - start) * 1e6, 3),
                        }
                    )
    return {"traceEvents": found, "displayTimeUnit": "ms"}
