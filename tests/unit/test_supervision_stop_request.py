"""Which steps a stop request finishes and which it interrupts."""

from __future__ import annotations

import pytest

from mppo.supervision import stop_request
from mppo.supervision.stop_request import StepInterrupted


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: now[0])
    yield now
    stop_request.reset()


def test_without_a_request_no_step_is_interrupted(clock):
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


def test_a_step_expected_to_end_too_late_is_interrupted_at_once(clock):
    stop_request.reset(20.0)
    stop_request.expect(60.0)
    clock[0] += 30.0
    stop_request.request()
    with pytest.raises(StepInterrupted) as left:
        stop_request.sync()
    assert not left.value.half_done


def test_a_step_that_takes_longer_than_expected_is_interrupted_in_the_end(clock):
    stop_request.reset(20.0)
    stop_request.request()
    stop_request.raise_if_due()
    clock[0] += 21.0
    with pytest.raises(StepInterrupted):
        stop_request.raise_if_due()


def test_updates_are_finished_if_there_is_time(clock):
    stop_request.reset(20.0)
    stop_request.request()
    clock[0] += 10.0
    stop_request.sync_between_updates(5, 10, began=100.0)
    with pytest.raises(StepInterrupted) as left:
        stop_request.sync_between_updates(1, 10, began=100.0)
    assert left.value.half_done


def test_with_null_no_step_is_interrupted(clock):
    stop_request.reset(None)
    stop_request.request()
    clock[0] += 1e6
    stop_request.raise_if_due()
    assert not stop_request.overdue()


@pytest.mark.parametrize(
    ("launcher", "in_time", "late"), [({}, 27.0, 29.0), ({"patience_s": 300.0}, 290.0, 299.0)]
)
def test_the_deadline_is_before_the_launchers_kill(clock, launcher, in_time, late):
    stop_request.reset(20.0, **launcher)
    stop_request.request()
    clock[0] += in_time
    assert not stop_request.overdue()
    clock[0] += late - in_time
    assert stop_request.overdue()


def test_after_training_there_is_no_deadline(clock):
    stop_request.reset(20.0)
    stop_request.request()
    stop_request.over()
    clock[0] += 1e6
    assert not stop_request.overdue()


def test_listeners_are_called_at_once_and_only_once(clock):
    reported = []
    stop_request.reset(20.0)
    stop_request.on_request(lambda: reported.append(clock[0]))
    stop_request.request()
    clock[0] += 1.0
    stop_request.request()
    assert reported == [100.0]
