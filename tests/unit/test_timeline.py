"""Timelines of an update: planned, for Perfetto, and as a picture."""

from __future__ import annotations

import json

import pytest

from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.schedule import make_schedule
from mppo.pipeline.streams import KINDS
from mppo.pipeline.timeline import (
    Event,
    Recorder,
    chrome_trace,
    idle_share,
    planned_events,
    read_trace,
)
from mppo.report.timeline_pictures import main

WORK = (RoleWork("critic", (2, 2), 1.0, 2.0), RoleWork("actor", (3,), 1.5, 2.5))


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_idles_as_the_simulation_says(kind):
    schedule = make_schedule(kind, WORK, 3)
    rows = planned_events(schedule)
    assert idle_share(rows) == pytest.approx(schedule.simulation.idle_share)
    assert max(e.end for row in rows for e in row) == schedule.simulation.makespan


class LateClock:
    """Its times are known only at the end, as those of a device."""

    def __init__(self) -> None:
        self.times: tuple[float, ...] = ()
        self._marks = 0

    def mark(self):
        number = self._marks
        self._marks += 1
        return lambda: self.times[number]


def test_a_recorder_tells_waiting_from_computing():
    clock = LateClock()
    recorder = Recorder(clock.mark)
    action, other = Action("forward", "actor", 0, 1), Action("step", "actor", 0)
    with recorder.action(action), recorder.waiting():
        pass
    with recorder.action(Action("receive_input", "actor", 0, 2)):
        pass
    with recorder.action(other):
        pass
    clock.times = (1.0, 2.0, 5.0, 7.0, 7.5, 8.0)
    assert recorder.events == [Event(action, 1.0, 3.0, 7.0), Event(other, 7.5, 0.0, 8.0)]


def test_a_trace_names_what_ran_and_what_waited():
    row = [Event(Action("backward", "critic", 1, 2), 10.0, 0.5, 11.0)]
    named, waiting, ran = chrome_trace([row])["traceEvents"]
    assert named["args"] == {"name": "rank 0"}
    assert (waiting["name"], waiting["ts"], waiting["dur"]) == ("waiting", 0.0, 5e5)
    assert (ran["name"], ran["ts"], ran["dur"]) == ("backward critic 1.2", 5e5, 5e5)


def test_traces_of_two_runs_become_one_picture(tmp_path):
    panels = []
    for kind in ("sequential", "flush_free"):
        rows = planned_events(make_schedule(kind, WORK, 3))
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(chrome_trace(rows)))
        panels.append(f"{kind}={path}")
        for found, row in zip(read_trace(json.loads(path.read_text())), rows, strict=True):
            assert [(e.action, round(e.start, 6), round(e.end, 6)) for e in found] == [
                (e.action, e.start + e.waited, e.end) for e in row
            ]
    main([str(tmp_path / "both.svg"), *panels])
    text = (tmp_path / "both.svg").read_text()
    assert text.index(">sequential: ") < text.index(">flush_free: ")


@pytest.mark.parametrize("trace", ["title only", "title=missing.json", "title=other.json"])
def test_a_trace_that_cannot_be_drawn_is_refused(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit) as left:
        main(["both.svg", trace])
    assert left.value.code == 2
    assert "trainer.timeline" in capsys.readouterr().err
