"""The recorded updates on the page: every event of plan and measurement, however many there are."""

from __future__ import annotations

import json

import pytest
from recorded_update import CLOCK, measured, recorded_update, schedule_of, write_timeline

from mppo.pipeline.timeline import chrome_trace
from mppo.report.html.timelines import newest_timelines, recorded_steps

SCHEDULE = schedule_of()


def events_of(found: dict, panel: dict) -> list[list[tuple]]:
    """Kind, role, mini-batch, micro-batch, chunk, start and end of each event of each row."""
    rows = []
    for _, flat in panel["rows"]:
        clock, row = 0, []
        for action, gap, length in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            start, clock = clock + gap, clock + gap + length
            row.append((*found["actions"][action], start * found["unit"], clock * found["unit"]))
        rows.append(row)
    return rows


def test_plan_and_measurement_have_all_events_on_one_scale(tmp_path):
    write_timeline(tmp_path, 3, recorded_update(SCHEDULE))
    (found,) = newest_timelines(tmp_path, 3)
    assert (found["step"], found["schedule"]) == (3, "flush_free")
    plan, real = found["panels"]
    assert [panel["name"] for panel in (plan, real)] == ["plan", "measured"]
    assert plan["idle"] == pytest.approx(SCHEDULE.simulation.idle_share, abs=1e-4)
    for panel, steps in ((plan, 0), (real, 1)):
        assert [number for number, _ in panel["rows"]] == [0, 1, 2]
        for row, events in zip(events_of(found, panel), measured(SCHEDULE), strict=True):
            assert len(row) == len(events) - 1 + steps
            for (*action, start, end), event in zip(row, events):
                expected = event.action
                assert tuple(action) == (expected.kind, *expected.numbers)
                times = [event.start + event.waited - CLOCK, event.end - CLOCK]
                assert [start, end] == pytest.approx(times, abs=1e-5)


def test_of_many_ranks_some_are_shown(tmp_path):
    write_timeline(tmp_path, 1, recorded_update(SCHEDULE, 200))
    (found,) = newest_timelines(tmp_path, 1)
    plan, real = found["panels"]
    numbers = [number for number, _ in real["rows"]]
    assert (len(numbers), numbers[0], numbers[-1], real["of"]) == (64, 0, 199, 200)
    assert (len(plan["rows"]), plan["of"]) == (3, 3)
    events = sum(len(flat) // 3 for panel in (plan, real) for _, flat in panel["rows"])
    assert len(json.dumps(found["panels"], separators=(",", ":"))) < 14 * events + 1000


def test_only_the_newest_steps_that_the_run_has_done_are_shown(tmp_path):
    for step in (2, 10, 4, 9):
        write_timeline(tmp_path, step, recorded_update(SCHEDULE))
    (tmp_path / "timeline/step_x.json").write_text("{}")
    (tmp_path / "timeline/step_3.png").write_bytes(b"")
    assert list(recorded_steps(tmp_path)) == [2, 4, 9, 10]
    assert [found["step"] for found in newest_timelines(tmp_path, 9)] == [4, 9]
    assert newest_timelines(tmp_path / "nothing", 9) == []


def test_a_file_written_anew_is_read_anew(tmp_path):
    write_timeline(tmp_path, 1, recorded_update(SCHEDULE))
    assert newest_timelines(tmp_path, 1)[0]["panels"][1]["of"] == 3
    write_timeline(tmp_path, 1, recorded_update(SCHEDULE, 4))
    assert newest_timelines(tmp_path, 1)[0]["panels"][1]["of"] == 4


def test_a_measurement_without_a_plan_is_shown_alone(tmp_path):
    write_timeline(tmp_path, 1, chrome_trace(measured(SCHEDULE)))
    (found,) = newest_timelines(tmp_path, 1)
    assert [panel["name"] for panel in found["panels"]] == ["measured"]


def changed(**changes) -> dict:
    """A trace whose first event has other values."""
    trace = recorded_update(SCHEDULE)
    event = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "waiting")
    arguments = {**event["args"], **changes.pop("args", {})}
    event.update(changes, args=arguments)
    return trace


DAMAGED = [
    ("half a file", '{"traceEvents": ['),
    ("a list", []),
    ("no events", {"traceEvents": []}),
    ("a plan that is a list", {**chrome_trace(measured(SCHEDULE)), "plan": []}),
    ("an unknown kind", changed(args={"kind": "explode"})),
    ("an unknown argument", changed(args={"x": 1})),
    ("a mini-batch that is text", changed(args={"mini_batch": "<b>"})),
    ("a time that is not a number", changed(ts=float("nan"))),
    ("an endless time", changed(dur=float("inf"))),
    ("a time that is text", changed(ts="now")),
    ("deep nesting", "[" * 100_000),
]


@pytest.mark.parametrize("trace", [row[1] for row in DAMAGED], ids=[row[0] for row in DAMAGED])
def test_a_damaged_file_is_named_and_the_others_shown(trace, tmp_path):
    write_timeline(tmp_path, 1, recorded_update(SCHEDULE))
    write_timeline(tmp_path, 2, trace)
    good, bad = newest_timelines(tmp_path, 2)
    assert "panels" in good
    assert bad["error"].startswith("the timeline cannot be read: ")
