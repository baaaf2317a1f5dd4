"""What happens to a run when a rank dies, hangs, is told to stop, or numbers cease to be finite."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched_run import LaunchedRun, same_weights, steps_logged


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run = LaunchedRun(run_dir)
    assert run.codes() == [0, 0], run.texts()
    return run_dir


def finishes_like(undisturbed: Path, run_dir: Path) -> None:
    run = LaunchedRun(run_dir)
    assert run.codes() == [0, 0], run.texts()
    assert "resumed from" in run.texts()
    assert steps_logged(run_dir) == 6
    assert same_weights(run_dir, undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_and_the_next_start_goes_on(tmp_path, undisturbed, victim):
    run = LaunchedRun(tmp_path)
    run.until_saved(2)
    run.send(victim, signal.SIGKILL)
    codes = run.codes(patience_s=120)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    text = run.output(1 - victim).read_text()
    if victim == 1:
        assert re.search(r"mppo: no sign of life for \d+ s from rank 1 of 2 \(pid \d+ on", text)
        # as of the rank's last sign of life, which may be older than the checkpoint waited for
        assert re.search(r"which was in: .*; last completed step: [1-5]", text)
    else:
        assert "mppo: the connection broke to rank 0 of 2" in text
    finishes_like(undisturbed, tmp_path)


def test_a_rank_that_hangs_is_named_and_every_other_leaves_its_stacks(tmp_path):
    run = LaunchedRun(tmp_path)
    run.until_step(1)
    run.send(1, signal.SIGSTOP)
    assert run.processes[0].wait(timeout=200) == 1
    run.kill()
    assert "no sign of life" in run.output(0).read_text()
    stacks = (tmp_path / "stacks/rank_00000.txt").read_text()
    assert "from rank 1 of 2" in stacks
    assert re.search(r"this rank: \w+", stacks)
    assert "heartbeat.py" in stacks
    assert "loop.py" in stacks


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_asked_to_stop_it_saves_and_leaves_cleanly(tmp_path, undisturbed, number):
    run = LaunchedRun(tmp_path, ["trainer.save_freq=-1"])
    run.until_step(1)
    run.send(1, number)
    assert run.codes() == [0, 0], run.texts()
    done = steps_logged(tmp_path)
    assert 1 <= done < 6
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"global_step_{done}"]
    assert not (tmp_path / "actor").exists(), "an unfinished run exports nothing"
    finishes_like(undisturbed, tmp_path)


def test_a_step_too_long_for_sigterm_is_abandoned_and_the_one_before_saved(tmp_path, undisturbed):
    run = LaunchedRun(tmp_path, ["trainer.save_freq=-1", "trainer.stop_within_s=0"])
    run.until_step(2)
    run.send(0, signal.SIGTERM)
    assert run.codes() == [0, 0], run.texts()
    done = steps_logged(tmp_path)
    assert 2 <= done < 6
    if f"abandoned step {done + 1}" not in run.texts():
        assert "stopping after this step" in run.texts(), "the signal came amid the updates"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"global_step_{done}"]
    finishes_like(undisturbed, tmp_path)


def test_asked_twice_it_exits_at_once(tmp_path):
    run = LaunchedRun(tmp_path, ["trainer.total_training_steps=200"])
    run.until_step(1)
    run.send(1, signal.SIGSTOP)
    run.send(0, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        run.processes[0].wait(timeout=1.5)
    run.send(0, signal.SIGTERM)
    assert run.processes[0].wait(timeout=60) == 128 + signal.SIGTERM
    run.kill()
    assert "SIGTERM again: exiting at once" in run.output(0).read_text()


BLOWN_UP = ["actor.optim.lr=1e30", "trainer.save_freq=-1"]


def test_a_gradient_that_is_not_finite_stops_the_run_and_can_be_replayed(tmp_path):
    run = LaunchedRun(tmp_path, BLOWN_UP)
    codes = run.codes()
    assert codes == [1, 1]
    text = run.texts()
    assert "gradient norm at step" in text
    assert "took no step" in text
    (case,) = (tmp_path / "nonfinite").iterdir()
    again = LaunchedRun(
        tmp_path / "again", command=[sys.executable, "-m", "mppo.replay", str(case)]
    )
    assert again.codes() == [0, 0], again.texts()
    assert re.search(r"rank \d: actor: gradient of chunk 0 \S+ has \d+ of \d+", again.texts())


def test_steps_that_are_not_finite_are_left_out_counted_and_limited(tmp_path):
    skip = ["trainer.on_nonfinite=skip", "trainer.max_nonfinite_in_a_row=3", "actor.ppo_epochs=4"]
    skip.append("critic.ppo_epochs=4")  # in a row within one step: a policy of nan cannot generate
    run = LaunchedRun(tmp_path, [*BLOWN_UP, *skip])
    assert run.codes() == [1, 1]
    assert "3 time(s) in a row" in run.texts()
