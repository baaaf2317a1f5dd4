"""Ranks of a node that need the same tensors share one copy of them."""

from __future__ import annotations

import gc
import os
import platform
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo.cpu.node_copies import nodes_of
from mppo.parallel.exchange import SMALLEST_SHARED, Moves, exchange

WORLD, LENGTHS = 4, [4000, 0, 1, 9000, 8500, 7777]
MOVES = Moves([0, 1, 2, 3, 0, 1], [[5, 0, 1, 3], [5, 0, 1, 3], [2, 4], [2, 4]])
ALIKE = ["first", "first", "second", "second"]


def _held(rank: int) -> tuple[list[int], list[torch.Tensor]]:
    numbers = [n for n, home in enumerate(MOVES.source) if home == rank]
    tokens = torch.cat([torch.arange(LENGTHS[n]) + 10_000 * n for n in numbers])
    experts = (tokens[:, None, None] * torch.arange(1, 185).view(23, 8)).to(torch.uint8)
    return numbers, [tokens.int(), experts, tokens.float()]


def _got(rank: int, group: dist.ProcessGroup | None, alike: list[str] | None) -> list[torch.Tensor]:
    numbers, tensors = _held(rank)
    return exchange(MOVES, LENGTHS, numbers, lambda _: tensors, group, alike)


def _is_mapped() -> bool:
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own descriptor
            assert "memfd:mppo" not in os.readlink(file), "the files are closed"
    return "memfd:mppo" in Path("/proc/self/maps").read_text()


def _worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
    try:
        expected = _got(rank, None, None)
        assert not _is_mapped()
        got = _got(rank, None, ALIKE)
        assert nodes_of(None) == [0] * WORLD
        assert all(map(torch.equal, got, expected))
        assert [x.dtype for x in got] == [x.dtype for x in expected]
        assert sum(x.nbytes for x in got) > SMALLEST_SHARED
        assert _is_mapped()
        dist.barrier()  # all have compared
        if rank % 2 == 0:
            got[1][-1, 0, 0] += 1  # only to see that it is the other rank's memory, too
        dist.barrier()
        assert got[1][-1, 0, 0] == expected[1][-1, 0, 0] + 1
        again = _got(rank, None, ALIKE)
        assert all(map(torch.equal, again, expected))
        del got, again
        gc.collect()
        assert not _is_mapped(), "it is gone with the tensors"
        apart = dist.new_group()
        if rank == 1:
            platform.node = lambda: "another machine"
        assert all(map(torch.equal, _got(rank, apart, ALIKE), expected))
        assert nodes_of(apart) == [0, 1, 0, 0]
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_ranks_of_a_node_share_what_they_both_need(tmp_path):
    start_ranks(_worker, (str(tmp_path / "store"),), WORLD)
