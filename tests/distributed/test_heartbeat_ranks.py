"""A rank that waits for another in vain ends with the reason, and says where every rank was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import begin_ranks

from mppo.parallel.launch import free_port

PHASES = ("updating actor", "reward")


def _never_comes() -> None:
    time.sleep(600)


def _fails() -> None:
    raise ValueError("no such answer")


def _fails_as_well() -> None:
    time.sleep(1.2)  # the watch has heard of the other rank's failure by then
    raise ValueError("no such answer")


def _fails_otherwise() -> None:
    raise ValueError("another answer")


def _waits() -> None:
    dist.barrier()


def _leaves() -> None:
    pass


def _leaves_slowly() -> None:
    time.sleep(2.5)


def _worker(
    rank: int, folder: Path, deeds: Sequence[Callable[[], None]], ending: Callable[[], None]
) -> None:
    from mppo.parallel.heartbeat import watching
    from mppo.parallel.launch import LaunchInfo, process_group
    from mppo.parallel.phase import phase, step_done
    from mppo.parallel.way_out import WayOut

    def tell(error: BaseException) -> None:
        with (folder / "told").open("a") as stream:
            stream.write(f"rank {rank}: {error}\n")

    with (folder / f"stderr_{rank}").open("w") as stream:
        os.dup2(stream.fileno(), 2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", int((folder / "port").read_text()), "python")
    step_done(2)
    try:
        with (
            WayOut(limit_s=6) as way_out,
            process_group(info, 60),
            watching(info, 60, 8, folder / "stacks", way_out, tell) as heartbeat,
        ):
            try:
                with heartbeat.telling(), phase(PHASES[rank], 3):
                    deeds[rank]()
            finally:
                if rank == 1:
                    ending()
    finally:
        assert not dist.is_initialized()
        (folder / f"left_{rank}").touch()


def _codes(
    folder: Path, *deeds: Callable[[], None], ending: Callable[[], None] = _leaves
) -> list[int | None]:
    """Exit codes of two ranks that do these deeds; the second one ends with ``ending``."""
    (folder / "port").write_text(str(free_port()))
    processes = begin_ranks(_worker, (folder, deeds, ending), 2).processes
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _told(folder: Path) -> list[str]:
    return (folder / "told").read_text().splitlines()


def _left(folder: Path) -> list[int]:
    """Ranks that came to the end of their way out, with their process groups destroyed."""
    return [rank for rank in range(2) if (folder / f"left_{rank}").exists()]


def _stacks(folder: Path, rank: int) -> str:
    return (folder / "stacks" / f"rank_{rank:05d}.txt").read_text()


def test_a_collective_that_hangs_ends_every_rank_with_its_stacks(tmp_path):
    assert _codes(tmp_path, _waits, _never_comes) == [1, 1]
    for rank in range(2):
        verdict = _stacks(tmp_path, rank).split("\n\n")[0]
        assert verdict.startswith("no rank has made progress for ")
        assert "  rank 0: updating actor, step 3; last completed step: 2" in verdict
        assert "  rank 1: reward, step 3; last completed step: 2" in verdict
    assert "this rank: updating actor, step 3" in _stacks(tmp_path, 0)
    assert "in barrier" in _stacks(tmp_path, 0)
    assert "this rank: reward, step 3" in _stacks(tmp_path, 1)
    assert "in _never_comes" in _stacks(tmp_path, 1)


def test_a_rank_that_fails_ends_those_that_wait_for_it_with_its_reason(tmp_path):
    assert _codes(tmp_path, _waits, _fails) == [1, 1]
    verdict = _stacks(tmp_path, 0).split("\n\n")[0]
    assert verdict.startswith("rank 1 of 2 failed in: reward, step 3; last completed step: 2: ")
    assert verdict.endswith("ValueError: no such answer")
    assert _told(tmp_path) == ["rank 1: no such answer"]
    assert _left(tmp_path) == [1]
    where, stacks = (tmp_path / "stderr_0").read_text().splitlines()[-2:]
    assert where.startswith("mppo: rank 1 of 2 failed in: reward, step 3; last completed step: 2; ")
    assert stacks == f"mppo: stacks of every rank: {tmp_path / 'stacks'}"


@pytest.mark.parametrize("deeds", [(_fails, _fails_as_well), (_fails_as_well, _fails)])
def test_a_failure_of_every_rank_is_told_once_and_all_leave_in_order(tmp_path, deeds):
    """Also the rank that fails while its watch knows of the other, and takes time to leave."""
    assert _codes(tmp_path, *deeds, ending=_leaves_slowly) == [1, 1]
    assert _told(tmp_path) == [f"rank {deeds.index(_fails)}: no such answer"]
    assert _left(tmp_path) == [0, 1]
    assert not (tmp_path / "stacks").exists()


def test_another_reason_is_told_as_well(tmp_path):
    assert _codes(tmp_path, _fails, _fails_otherwise) == [1, 1]
    assert sorted(_told(tmp_path)) == ["rank 0: no such answer", "rank 1: another answer"]
    assert _left(tmp_path) == [0, 1]
    assert not (tmp_path / "stacks").exists()


def test_a_failed_rank_that_does_not_get_out_ends_with_its_stacks(tmp_path):
    assert _codes(tmp_path, _fails, _fails, ending=_never_comes) == [1, 1]
    assert len(_told(tmp_path)) == 1
    assert _left(tmp_path) == [0]
    assert _stacks(tmp_path, 1).startswith("rank 1 of 2 has failed, and was not out 6 s later\n")
    assert "in _never_comes" in _stacks(tmp_path, 1)
