"""The health of a job, judged by its ranks' heartbeats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mppo.recipe.sections.trainer import TrainerConfig
from mppo.supervision import health
from mppo.supervision.health import Beat, HealthMonitor
from mppo.supervision.heartbeat import is_consequence


def beat(number: int, progress: int, phase: str = "gen, step 3", last_step: int = 2) -> Beat:
    return Beat(number, progress, phase, last_step, "node7", 123)


def test_a_job_with_heartbeats_and_progress_is_healthy():
    judge = HealthMonitor(2, silence_s=20, hang_s=100)
    for second in range(300):
        judge.update({0: beat(second, second // 50), 1: beat(second, 0)}, float(second))
        assert judge.diagnose(float(second)) is None


def test_a_silent_rank_is_named_with_phase_and_step():
    judge = HealthMonitor(2, silence_s=20, hang_s=100)
    judge.update({0: beat(1, 1), 1: beat(1, 1, "updating critic, step 5", 4)}, 0.0)
    for second in range(1, 21):
        judge.update(
            {0: beat(1 + second, second), 1: beat(1, 1, "updating critic, step 5", 4)}, second
        )
        assert judge.diagnose(float(second)) is None
    judge.update({0: beat(40, 40, last_step=5)}, 21.0)
    assert judge.diagnose(21.0) == (
        "no heartbeat for 21 s from rank 1 of 2 (pid 123 on node7), which was in: "
        "updating critic, step 5; last completed step: 5"
    )


def test_by_default_a_dead_rank_is_found_well_within_half_a_minute():
    silence_s = TrainerConfig().heartbeat_timeout_s
    judge = HealthMonitor(2, silence_s, hang_s=1e9)
    judge.update({0: beat(0, 0), 1: beat(0, 0)}, 0.0)
    judge.update({0: beat(1, 1)}, 25.0)
    assert "rank 1 of 2" in judge.diagnose(25.0)


def test_a_hang_reports_where_every_rank_is():
    judge = HealthMonitor(5, silence_s=20, hang_s=60)
    for second in range(62):
        beats = {rank: beat(second, 7, "updating actor, step 3") for rank in (0, 1, 2, 4)}
        judge.update({**beats, 3: beat(second, 9, "reward, step 3")}, float(second))
    verdict = judge.diagnose(61.0)
    assert verdict is not None
    assert verdict.splitlines() == [
        "no rank has made progress for 61 s:",
        "  rank 0-2,4: updating actor, step 3; last completed step: 2",
        "  rank 3: reward, step 3; last completed step: 2",
    ]


def test_ranks_without_a_first_heartbeat_are_not_reported():
    judge = HealthMonitor(3, silence_s=20, hang_s=1000)
    for second in range(100):
        judge.update({0: beat(second, second)}, float(second))
        assert judge.diagnose(float(second)) is None


def test_which_errors_are_consequences():
    assert is_consequence(RuntimeError("[/x/third_party/gloo/gloo/pair.cc:1] Connection closed"))
    assert not is_consequence(RuntimeError("division by zero"))


def test_the_awake_clock_counts_the_largest_gap_of_a_process_that_was_stopped(monkeypatch):
    times = iter([0.0, 0.1, 5.1, 5.2])
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = health.AwakeClock(0.1)
    counted = [clock.now() for _ in range(3)]
    assert counted == pytest.approx([0.1, 0.4, 0.5])
