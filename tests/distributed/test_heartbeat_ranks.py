"""A rank that waits for a dead or hanging one ends with the reason and every rank's phase."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ledger_server import Ledger
from ranks import begin_ranks
from shared_memory_files import check_nothing_is_left, shared_files
from test_memory_handover import GPU, Trainer
from test_schedules import failing_update
from tiny_models import save

from mppo.parallel.addresses import free_port
from mppo.report.run_record import read_events
from mppo.supervision import heartbeat
from mppo.supervision.heartbeat import Heartbeat

PHASES = ("updating actor", "reward", "gen")
PATIENCE_S = 300.0
"""Much longer than all limits in the tests; a rank that has not ended by then hangs."""
SILENCE_S = 8
"""Of a rank that is stopped or killed."""


def _never_comes() -> None:
    time.sleep(600)


def _fails() -> None:
    raise ValueError("no such answer")


def _fails_too(answer: str = "no such") -> None:
    """Fail as the other rank does, for whose failure each one's heartbeat waits long enough."""
    heartbeat._SAME_FAILURE_BEATS = PATIENCE_S
    dist.barrier()
    raise ValueError(f"{answer} answer")


def _fails_later() -> None:
    """Fail after this rank's heartbeat has seen the other one's failure."""
    seen, watch = threading.Event(), Heartbeat._watch

    def watched(self: Heartbeat) -> str | None:
        why = watch(self)
        if why is not None:
            seen.set()
        return why

    Heartbeat._watch = watched
    try:
        _fails_too()
    finally:
        assert seen.wait(PATIENCE_S)


def _exchanges(failing: bool = False) -> None:
    """Exchange two sequences of 8 MB; the failing rank never sends the second time."""
    from mppo.parallel.exchange import Moves, exchange

    moves, rank = Moves([0, 1], [[0, 1], [0, 1]]), dist.get_rank()
    for attempt in range(2):

        def tensors_for(receiver: int, attempt: int = attempt) -> list[torch.Tensor]:
            if failing and attempt:
                raise ValueError("no such answer")
            return [torch.ones(1 << 21)]

        exchange(moves, [1 << 21] * 2, [rank], tensors_for)


def _fails_in_an_exchange() -> None:
    _exchanges(failing=True)


def _exchanges_until_killed(folder: Path) -> None:
    """Exchange 8 MB again and again, of which both ranks share one copy."""
    from mppo.parallel.exchange import Moves, exchange

    moves, rank, tensor = Moves([0, 1], [[0, 1], [0, 1]]), dist.get_rank(), torch.ones(1 << 20)
    while True:
        exchange(moves, [1 << 20] * 2, [rank], lambda _: [tensor], alike=[0, 0])
        (folder / f"exchanged_{rank}").touch()


def _exchanges_while_the_server_dies(folder: Path, lacking: float) -> None:
    """Receive responses and exchange as much; the server is killed before the messages are sent.

    Args:
        folder: of the ledger.
        lacking: GiB that another program takes before the server starts again.
    """
    from mppo.parallel.exchange import Moves, exchange

    rank, trainer = dist.get_rank(), Trainer(folder, dist.get_rank(), 2, late_s=0.0)
    killed: list[psutil.Process] = []

    def tensors_for(receiver: int) -> list[torch.Tensor]:
        if trainer.engine.fleet.processes and not killed:
            guard = psutil.Process(trainer.engine.fleet.processes[0].pid)
            killed.extend(guard.children())
            killed[0].kill()
            guard.wait(timeout=PATIENCE_S)
        return [torch.full((1 << 20,), rank + 1.0)]

    try:
        trainer.sync()
        trainer.generate()
        moves = Moves([0, 1], [[0, 1], [0, 1]])
        (got,) = exchange(moves, [1 << 20] * 2, [rank], tensors_for, alike=[0, 0])
        assert got.sum() == 3 << 20
        assert len(killed) == (rank == 0)
        trainer.engine.sleep()
        if lacking and rank == 0:
            trainer.ledger.hold(0, "another program", lacking)
        trainer.sync()
        trainer.generate()
    finally:
        trainer.engine.stop()


def _waits() -> None:
    dist.barrier()


def _exits() -> None:
    pass


def _exits_after_the_watch() -> None:
    """The watch of a rank that has failed ends, and does not end the rank."""
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join()


def _mark_begun(heartbeat: Heartbeat, folder: Path, rank: int) -> None:
    sent = heartbeat._beats_sent
    while heartbeat._beats_sent < sent + 3:  # one was being sent, and one has been sent since
        time.sleep(0.05)
    (folder / f"begun_{rank}").touch()


def _worker(
    rank: int,
    folder: Path,
    actions: Sequence[Callable[[], None]],
    ending: Callable[[], None],
    silence_s: float,
    hang_s: float,
    cleanup_s: float = PATIENCE_S,
) -> None:
    """Run a rank's action; ``begun_RANK`` appears when other ranks know the phase it is in."""
    from mppo.parallel.launch import LaunchInfo
    from mppo.parallel.process_group import process_group
    from mppo.supervision.heartbeat import CleanupDeadline
    from mppo.supervision.phase import phase, step_done

    def report(error: BaseException) -> None:
        with (folder / "reported").open("a") as stream:
            stream.write(f"rank {rank}: {error}\n")

    with (folder / f"stderr_{rank}").open("w") as stream:
        os.dup2(stream.fileno(), 2)
    port, world = int((folder / "port").read_text()), len(actions)
    info = LaunchInfo(rank, world, rank, world, "127.0.0.1", port, "python")
    step_done(2)
    try:
        with (
            CleanupDeadline(cleanup_s) as cleanup,
            process_group(info, 60),
            Heartbeat(
                info, silence_s, hang_s, folder / "stacks", cleanup, report
            ).running() as heartbeat,
        ):
            try:
                with heartbeat.report_failures(), phase(PHASES[rank], 3):
                    given = (heartbeat, folder, rank)
                    threading.Thread(target=_mark_begun, args=given, daemon=True).start()
                    actions[rank]()
            finally:
                if rank == 1:
                    ending()
    finally:
        assert not dist.is_initialized()
        (folder / f"left_{rank}").touch()


def _codes(
    folder: Path,
    *actions: Callable[[], None],
    ending: Callable[[], None] = _exits,
    hang_s: float = PATIENCE_S,
    cleanup_s: float = PATIENCE_S,
) -> list[int | None]:
    """Exit codes of two ranks that run these actions; the second one ends with ``ending``."""
    (folder / "port").write_text(str(free_port()))
    processes = begin_ranks(_worker, (folder, actions, ending, 60, hang_s, cleanup_s), 2).processes
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _wait_for(*files: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"no {files}"
        time.sleep(0.05)


def _codes_with_the_first_rank_stopped(
    folder: Path, *actions: Callable[[], None]
) -> list[int | None]:
    """Exit codes of the other ranks, after a SIGSTOP to the first; None if a rank has not ended."""
    (folder / "port").write_text(str(free_port()))
    arguments = (folder, actions, _exits, SILENCE_S, 600)
    processes = begin_ranks(_worker, arguments, len(actions)).processes
    try:
        _wait_for(*(folder / f"begun_{rank}" for rank in range(len(actions))))
        os.kill(processes[0].pid, signal.SIGSTOP)
        (folder / "stopped").touch()
        for process in processes[1:]:
            process.join(PATIENCE_S)
        return [process.exitcode for process in processes[1:]]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _fails_once_the_first_has_stopped(folder: Path) -> None:
    while not (folder / "stopped").exists():
        time.sleep(0.05)
    raise ValueError("no such answer")


def _reported(folder: Path) -> list[str]:
    return (folder / "reported").read_text().splitlines()


def _exited_cleanly(folder: Path) -> list[int]:
    """Ranks that exited cleanly, with their process groups destroyed."""
    return [rank for rank in range(2) if (folder / f"left_{rank}").exists()]


def _stacks(folder: Path, rank: int) -> str:
    return (folder / "stacks" / f"rank_{rank:05d}.txt").read_text()


def test_a_collective_that_hangs_ends_every_rank_with_its_stacks(tmp_path):
    assert _codes(tmp_path, _waits, _never_comes, hang_s=8) == [1, 1]
    for rank in range(2):
        verdict = _stacks(tmp_path, rank).split("\n\n")[0]
        assert verdict.startswith("no rank has made progress for ")
        assert "  rank 0: updating actor, step 3; last completed step: 2" in verdict
        assert "  rank 1: reward, step 3; last completed step: 2" in verdict
    assert "this rank: updating actor, step 3" in _stacks(tmp_path, 0)
    assert "in barrier" in _stacks(tmp_path, 0)
    assert "this rank: reward, step 3" in _stacks(tmp_path, 1)
    assert "in _never_comes" in _stacks(tmp_path, 1)


def test_a_failed_rank_ends_the_waiting_ranks_with_its_reason(tmp_path):
    assert _codes(tmp_path, _waits, _fails) == [1, 1]
    verdict = _stacks(tmp_path, 0).split("\n\n")[0]
    assert verdict.startswith("rank 1 of 2 failed in: reward, step 3; last completed step: 2: ")
    assert verdict.endswith("ValueError: no such answer")
    assert _reported(tmp_path) == ["rank 1: no such answer"]
    assert _exited_cleanly(tmp_path) == [1]
    where, stacks = (tmp_path / "stderr_0").read_text().splitlines()[-2:]
    assert where.startswith("mppo: rank 1 of 2 failed in: reward, step 3; last completed step: 2; ")
    assert stacks == f"mppo: stacks of every rank: {tmp_path / 'stacks'}"


def test_a_rank_that_fails_in_the_middle_of_a_shared_update_ends_the_other(tmp_path):
    save("qwen2", tmp_path / "qwen2")
    update = partial(failing_update, tmp_path, 1)
    assert _codes(tmp_path, update, update) == [1, 1]
    verdict = _stacks(tmp_path, 0).split("\n\n")[0]
    assert verdict.startswith("rank 1 of 2 failed in: ")
    assert "updating in one stream, step 1 > updating actor; last completed step: 2: " in verdict
    assert verdict.endswith("ValueError: no such answer")
    assert "carry_out" in _stacks(tmp_path, 0)
    assert _reported(tmp_path) == ["rank 1: no such answer"]
    assert _exited_cleanly(tmp_path) == [1]


def test_a_rank_that_fails_in_the_middle_of_an_exchange_ends_the_other(tmp_path):
    before = shared_files()
    assert _codes(tmp_path, _exchanges, _fails_in_an_exchange) == [1, 1]
    verdict = _stacks(tmp_path, 0).split("\n\n")[0]
    assert verdict.startswith("rank 1 of 2 failed in: reward, step 3; last completed step: 2: ")
    assert "in exchange" in _stacks(tmp_path, 0)
    assert _reported(tmp_path) == ["rank 1: no such answer"]
    assert _exited_cleanly(tmp_path) == [1]
    check_nothing_is_left(before)


def test_a_rank_killed_in_an_exchange_ends_the_other_and_leaves_no_shared_memory(tmp_path):
    before = shared_files()
    (tmp_path / "port").write_text(str(free_port()))
    action = partial(_exchanges_until_killed, tmp_path)
    arguments = (tmp_path, [action, action], _exits, SILENCE_S, 600)
    processes = begin_ranks(_worker, arguments, 2).processes
    try:
        names = ("exchanged_0", "exchanged_1", "begun_1")
        _wait_for(*(tmp_path / name for name in names))
        os.kill(processes[1].pid, signal.SIGKILL)
        for process in processes:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes] == [1, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
            process.join()
    verdict = r"mppo: no heartbeat for \d+ s from rank 1 of 2 .* which was in: reward, step 3"
    assert re.search(verdict, (tmp_path / "stderr_0").read_text())
    check_nothing_is_left(before)


@pytest.mark.parametrize("lacking", [0.0, 25.0], ids=["it starts again", "it cannot start"])
def test_a_server_killed_while_responses_are_exchanged(tmp_path, lacking):
    before = shared_files()
    Ledger(tmp_path / "ledger.json").create(gpus=2, capacity=GPU)
    action = partial(_exchanges_while_the_server_dies, tmp_path, lacking)
    codes = _codes(tmp_path, action, action)
    assert codes == ([1, 1] if lacking else [0, 0])
    restarts = [event.text for event in read_events(tmp_path)]
    assert all(text.startswith("restarting test server 0: ") for text in restarts)
    assert len(restarts) == 1
    if lacking:
        why = "rank 0: test server 0 ended while starting; the end of "
        reported = "\n".join(_reported(tmp_path))
        assert re.match(f"rank [01]: {why}", reported)
        assert reported.count(why) == 1
        assert "ended with code 1" in reported
        assert not (tmp_path / "stacks").exists()
    assert _exited_cleanly(tmp_path) == [0, 1]
    check_nothing_is_left(before)


@pytest.mark.parametrize("actions", [(_fails_too, _fails_later), (_fails_later, _fails_too)])
def test_the_same_failure_on_every_rank_is_printed_once_and_all_exit_cleanly(tmp_path, actions):
    """Also if a rank fails after its heartbeat has seen the other failure, and exits slowly."""
    assert _codes(tmp_path, *actions, ending=_exits_after_the_watch) == [1, 1]
    assert _reported(tmp_path) == [f"rank {actions.index(_fails_too)}: no such answer"]
    assert _exited_cleanly(tmp_path) == [0, 1]
    assert not (tmp_path / "stacks").exists()


def test_different_failures_are_all_printed(tmp_path):
    assert _codes(tmp_path, _fails_too, partial(_fails_too, "another")) == [1, 1]
    assert sorted(_reported(tmp_path)) == ["rank 0: no such answer", "rank 1: another answer"]
    assert _exited_cleanly(tmp_path) == [0, 1]
    assert not (tmp_path / "stacks").exists()


def test_a_failed_rank_that_cannot_exit_ends_with_its_stacks(tmp_path):
    codes = _codes(tmp_path, _fails_too, _fails_too, ending=_never_comes, cleanup_s=10)
    assert codes == [1, 1]
    assert len(_reported(tmp_path)) == 1
    assert _exited_cleanly(tmp_path) == [0]
    assert _stacks(tmp_path, 1).startswith("rank 1 of 2 failed and did not shut down within 10 s\n")
    assert "in _never_comes" in _stacks(tmp_path, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_stopped_first_rank_ends_the_others(tmp_path, world):
    """It hosts the store; no collective fails, because its connections stay open."""
    codes = _codes_with_the_first_rank_stopped(tmp_path, _never_comes, *[_waits] * (world - 1))
    assert codes == [1] * (world - 1)
    for rank in range(1, world):
        verdict = _stacks(tmp_path, rank).split("\n\n")[0]
        assert re.fullmatch(
            rf"no heartbeat for \d+ s from rank 0 of {world} \(pid \d+ on \S+\), which was in: "
            r"updating actor, step 3; last completed step: 2",
            verdict,
        )
        assert "in barrier" in _stacks(tmp_path, rank)
    assert "mppo: no heartbeat for" in (tmp_path / "stderr_1").read_text()


def test_a_rank_that_fails_while_the_first_is_stopped_prints_its_own_error(tmp_path):
    fails = partial(_fails_once_the_first_has_stopped, tmp_path)
    assert _codes_with_the_first_rank_stopped(tmp_path, _never_comes, fails) == [1]
    assert _reported(tmp_path) == ["rank 1: no such answer"]
    assert _stacks(tmp_path, 1).startswith("no heartbeat for ")
