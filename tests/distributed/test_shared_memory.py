"""Large collectives through shared memory give the same results as gloo."""

import platform

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo.cpu.shared_memory import shared_memory_of


def _compare(memory, group, mine: torch.Tensor) -> None:
    """Compare the three collectives with gloo's, in place if Megatron runs them in place."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    summed, ours = mine.clone(), mine.clone()
    dist.all_reduce(summed, group=group)
    memory.all_reduce(ours)
    torch.testing.assert_close(ours, summed)
    everybody = [torch.empty_like(ours) for _ in range(world)]
    dist.all_gather(everybody, ours, group=group)
    assert all(torch.equal(ours, theirs) for theirs in everybody)

    scattered = mine.clone()
    part = scattered.view(world, -1)[rank]
    memory.reduce_scatter(part, scattered)
    torch.testing.assert_close(part, summed.view(world, -1)[rank])
    memory.all_gather(scattered, part)
    torch.testing.assert_close(scattered, summed)


def _worker(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    try:
        torch.manual_seed(rank)
        pair = dist.new_group([0, 2])
        memory = shared_memory_of(None)
        assert memory is shared_memory_of(dist.group.WORLD)
        # one element per rank; more than a slot; twice, so that both halves are reused
        for count in (world, world * 1001, (12 << 20) // 4 * world, 2 * world):
            _compare(memory, dist.group.WORLD, torch.randn(count))
        _compare(memory, dist.group.WORLD, torch.randn(4 * world).bfloat16())
        if rank != 1:
            _compare(shared_memory_of(pair), pair, torch.randn(1002))
        apart = dist.new_group()
        if rank == 1:
            platform.node = lambda: "another machine"
        assert shared_memory_of(apart) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_shared_memory_sums_and_gathers_as_gloo_does(tmp_path) -> None:
    start_ranks(_worker, (3, str(tmp_path / "store")), 3)
