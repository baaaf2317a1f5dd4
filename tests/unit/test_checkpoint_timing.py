"""When checkpoints are due."""

from __future__ import annotations

import pytest

from mppo.checkpoint.timing import SaveTiming, parse_duration
from mppo.recipe.sections.trainer import TrainerConfig


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def timing(**trainer) -> tuple[SaveTiming, Clock]:
    clock = Clock()
    return SaveTiming(TrainerConfig(**trainer), clock), clock


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:30", 30), ("1:02:03", 3723), ("02:00:00:00", 172800), ("00:03:45:00", 13500)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


def test_every_n_steps_and_the_last():
    every, _ = timing(save_freq=3)
    assert [s for s in range(1, 9) if every.is_due_by_step(s, last=s == 8)] == [3, 6, 8]


def test_nothing_is_scheduled_by_default():
    never, clock = timing()
    clock.time += 1e6
    assert not never.is_due_by_step(10, last=True)
    assert not never.is_due_by_clock()
    assert not never.must_stop()


def test_every_t_minutes_since_the_last_save():
    watch, clock = timing(save_every_minutes=2)
    clock.time += 119
    assert not watch.is_due_by_clock()
    clock.time += 1
    assert watch.is_due_by_clock()
    watch.saved()
    assert not watch.is_due_by_clock()
    assert watch.is_due_by_step(5, last=True)


def test_a_run_stops_when_time_for_one_more_step_and_save_runs_out():
    watch, clock = timing(checkpoint_must_save_by="00:10:00")
    watch.longest_save_s = 20.0
    for _ in range(8):
        clock.time += 60
        watch.step_done()
    assert not watch.must_stop(), "480 s gone, 60 + 30 + 30 needed"
    clock.time += 1
    assert watch.must_stop()


def test_before_the_first_save_its_duration_is_estimated_from_its_size():
    watch, _ = timing()
    watch.checkpoint_bytes = 3.2e9
    assert watch.expected_save_s == 32.0
    watch.longest_save_s = 5.0
    assert watch.expected_save_s == 5.0


STOPPING = [
    (3, 5.0, 30, ["may take 5 s (the longest save so far)"], "killed"),
    (3, 0.0, 300, ["may take 32 s (estimated for 3.2 GB, no save measured yet)"], "killed"),
    (3, 41.0, 30, ["may be killed 30 s after", "--shutdown-timeout 300"], "nothing"),
    (3, 400.0, 300, ["may be killed 300 s after", "--shutdown-timeout 1200"], "nothing"),
    (0, 41.0, 30, ["there is nothing to save unless the first step ends in time"], "killed"),
]


@pytest.mark.parametrize(("done", "longest", "patience", "said", "unsaid"), STOPPING)
def test_the_time_to_stop_is_printed(done, longest, patience, said, unsaid):
    watch, _ = timing()
    watch.checkpoint_bytes, watch.longest_save_s = 3.2e9, longest
    line = watch.describe_stopping(done, patience)
    assert all(text in line for text in said), line
    assert unsaid not in line


def test_stopping_without_a_checkpoint_is_printed():
    watch, _ = timing(save_on_signal=False)
    assert "without a checkpoint (trainer.save_on_signal=false)" in watch.describe_stopping(3, 30)
