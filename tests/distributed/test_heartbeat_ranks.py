"""A rank that waits for another in vain ends with the reason, and says where every rank was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from ranks import begin_ranks


def _never_comes() -> None:
    time.sleep(600)


def _fails() -> None:
    raise ValueError("no such answer")


def _worker(rank: int, folder: Path, elsewhere: Callable[[], None]) -> None:
    from mppo.parallel.heartbeat import watching
    from mppo.parallel.launch import LaunchInfo
    from mppo.parallel.phase import phase, step_done

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 1, "python")
    step_done(2)
    with watching(info, silence_s=60, hang_s=8, stacks=folder / "stacks"):
        if rank == 0:
            with phase("updating actor", 3):
                dist.barrier()
        with phase("reward", 3):
            elsewhere()


def _codes(folder: Path, elsewhere: Callable[[], None]) -> list[int | None]:
    """Exit codes of a rank in a collective and of one that is ``elsewhere``."""
    processes = begin_ranks(_worker, (folder, elsewhere), 2).processes
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _stacks(folder: Path, rank: int) -> str:
    return (folder / "stacks" / f"rank_{rank:05d}.txt").read_text()


def test_a_collective_that_hangs_ends_every_rank_with_its_stacks(tmp_path):
    assert _codes(tmp_path, _never_comes) == [1, 1]
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
    assert _codes(tmp_path, _fails) == [1, 1]
    verdict = _stacks(tmp_path, 0).split("\n\n")[0]
    assert verdict.startswith("rank 1 of 2 failed in: reward, step 3; last completed step: 2: ")
    assert verdict.endswith("ValueError: no such answer")
