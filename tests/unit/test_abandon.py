"""Which step is finished and which is left when the run is asked to stop."""

from __future__ import annotations

import pytest

from mppo.supervision import stop_request
from mppo.supervision.stop_request import StepInterrupted


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now[0])
    yield now
    stop_request.reset()


def test_nothing_is_left_unasked(clock):
    stop_request.reset(20.0)
    stop_request.expect(1e6)
    clock[0] += 1e6
    stop_request.raise_if_due()
    stop_request.sync()
    stop_request.sync_between_updates(1, 1000, began=0.0)
    assert not stop_request.overdue()


def test_a_step_expected_to_end_in_time_is_finished(clock):
    stop_request.reset(20.0)
    stop_request.expect(60.0)
    clock[0] += 45.0
    stop_request.request()
    stop_request.raise_if_due()
    clock[0] += 19.0
    stop_request.sync()


def test_a_step_expected_to_end_too_late_is_left_at_once(clock):
    stop_request.reset(20.0)
    stop_request.expect(60.0)
    clock[0] += 30.0
    stop_request.request()
    with pytest.raises(StepInterrupted) as left:
        stop_request.sync()
    assert not left.value.half_done


def test_a_step_that_takes_longer_than_expected_is_left_in_the_end(clock):
    stop_request.reset(20.0)
    stop_request.request()
    stop_request.raise_if_due()
    clock[0] += 21.0
    with pytest.raises(StepInterrupted):
        stop_request.raise_if_due()


def test_updates_are_finished_where_the_rest_fits(clock):
    stop_request.reset(20.0)
    stop_request.request()
    clock[0] += 10.0
    stop_request.sync_between_updates(5, 10, began=100.0)
    with pytest.raises(StepInterrupted) as left:
        stop_request.sync_between_updates(1, 10, began=100.0)
    assert left.value.half_done


def test_null_never_leaves_a_step(clock):
    stop_request.reset(None)
    stop_request.request()
    clock[0] += 1e6
    stop_request.raise_if_due()
    assert not stop_request.overdue()


def test_before_the_launcher_kills_the_process_speaks(clock):
    stop_request.reset(20.0)
    stop_request.request()
    clock[0] += 27.0
    assert not stop_request.overdue()
    clock[0] += 2.0
    assert stop_request.overdue()


def test_a_launcher_that_waits_longer_gives_more_time(clock):
    stop_request.reset(20.0, patience_s=300.0)
    stop_request.request()
    clock[0] += 290.0
    assert not stop_request.overdue()
    clock[0] += 9.0
    assert stop_request.overdue()


def test_once_training_has_ended_nothing_is_late(clock):
    stop_request.reset(20.0)
    stop_request.request()
    stop_request.over()
    clock[0] += 1e6
    assert not stop_request.overdue()


def test_whoever_wants_to_know_is_told_at_once_and_once(clock):
    told = []
    stop_request.reset(20.0)
    stop_request.on_request(lambda: told.append(clock[0]))
    stop_request.request()
    clock[0] += 1.0
    stop_request.request()
    assert told == [100.0]
