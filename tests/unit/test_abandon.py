"""Which step is finished and which is left when the run is asked to stop."""

from __future__ import annotations

import pytest

from mppo.parallel import abandon
from mppo.parallel.abandon import Abandoned


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(abandon.time, "monotonic", lambda: now[0])
    yield now
    abandon.reset()


def test_nothing_is_left_unasked(clock):
    abandon.reset(20.0)
    abandon.expect(1e6)
    clock[0] += 1e6
    abandon.check()
    abandon.meet()
    abandon.meet_half_done(1, 1000, began=0.0)
    assert not abandon.overdue()


def test_a_step_expected_to_end_in_time_is_finished(clock):
    abandon.reset(20.0)
    abandon.expect(60.0)
    clock[0] += 45.0
    abandon.ask()
    abandon.check()
    clock[0] += 19.0
    abandon.meet()


def test_a_step_expected_to_end_too_late_is_left_at_once(clock):
    abandon.reset(20.0)
    abandon.expect(60.0)
    clock[0] += 30.0
    abandon.ask()
    with pytest.raises(Abandoned) as left:
        abandon.meet()
    assert not left.value.half_done


def test_a_step_that_takes_longer_than_expected_is_left_in_the_end(clock):
    abandon.reset(20.0)
    abandon.ask()
    abandon.check()
    clock[0] += 21.0
    with pytest.raises(Abandoned):
        abandon.check()


def test_updates_are_finished_where_the_rest_fits(clock):
    abandon.reset(20.0)
    abandon.ask()
    clock[0] += 10.0
    abandon.meet_half_done(5, 10, began=100.0)
    with pytest.raises(Abandoned) as left:
        abandon.meet_half_done(1, 10, began=100.0)
    assert left.value.half_done


def test_null_never_leaves_a_step(clock):
    abandon.reset(None)
    abandon.ask()
    clock[0] += 1e6
    abandon.check()
    assert not abandon.overdue()


def test_before_the_launcher_kills_the_process_speaks(clock):
    abandon.reset(20.0)
    abandon.ask()
    clock[0] += 27.0
    assert not abandon.overdue()
    clock[0] += 2.0
    assert abandon.overdue()


def test_a_launcher_that_waits_longer_gives_more_time(clock):
    abandon.reset(20.0, patience_s=300.0)
    abandon.ask()
    clock[0] += 290.0
    assert not abandon.overdue()
    clock[0] += 9.0
    assert abandon.overdue()


def test_once_training_has_ended_nothing_is_late(clock):
    abandon.reset(20.0)
    abandon.ask()
    abandon.over()
    clock[0] += 1e6
    assert not abandon.overdue()


def test_whoever_wants_to_know_is_told_at_once_and_once(clock):
    told = []
    abandon.reset(20.0)
    abandon.on_ask(lambda: told.append(clock[0]))
    abandon.ask()
    clock[0] += 1.0
    abandon.ask()
    assert told == [100.0]
