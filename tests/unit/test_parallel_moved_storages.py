"""Storages in host memory: views stay valid, host memory is reused, unchanged content is kept."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from mppo.checkpoint.writer import give_own_storages
from mppo.parallel.moved_storages import MovedStorages
from mppo.weights.hf.safetensors_file import byte_view

CPU = torch.device("cpu")


def tensors() -> list[Tensor]:
    """Two parameters in one buffer, and a third with memory of its own."""
    buffer = torch.arange(1000.0)
    first, second = nn.Parameter(buffer[:100].view(10, 10)), nn.Parameter(buffer[128:400])
    return [first, second, nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]


def device_bytes(of: list[Tensor]) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in of}.values())


def test_every_view_is_valid_after_the_return() -> None:
    moved = tensors()
    before = [x.detach().clone() for x in moved]
    row, flat = moved[0].data[3], moved[0].data.view(-1)
    storages = MovedStorages(lambda: moved, CPU)
    assert device_bytes(moved) == 4014
    storages.leave()
    assert device_bytes(moved) == 0
    assert storages.is_moved
    storages.arrive()
    storages.wait()
    assert device_bytes(moved) == 4014
    assert all(torch.equal(x, y) for x, y in zip(moved, before))
    moved[0].data.zero_()
    assert not row.any()
    assert not flat.any()


def test_what_left_can_be_read_in_host_memory() -> None:
    moved = tensors()
    before = [x.detach().clone() for x in moved]
    inner = moved[1].data[5:9]
    storages = MovedStorages(lambda: moved, CPU)
    assert storages.readable(moved[0]) is moved[0]
    storages.leave()
    assert all(torch.equal(storages.readable(x), y) for x, y in zip(moved, before))
    assert torch.equal(storages.readable(inner), before[1][5:9])
    other = torch.ones(3)
    assert storages.readable(other) is other


def test_host_memory_is_reused_and_grows_with_the_tensors() -> None:
    moved = tensors()
    storages = MovedStorages(lambda: moved, CPU)
    addresses = set()
    for value in range(3):
        with torch.no_grad():
            moved[0].fill_(value)
        storages.changed = True
        storages.leave()
        addresses.add(storages.readable(moved[0]).data_ptr())
        storages.arrive()
        assert (moved[0] == value).all()
    assert len(addresses) == 1
    assert storages.host_nbytes == 4096 + 512
    moved.append(torch.full((1000,), 5.0))
    storages.leave()
    storages.arrive()
    assert (moved[3] == 5).all()
    assert storages.host_nbytes == 2 * 4096 + 512


def test_unchanged_content_is_not_copied_again() -> None:
    """A frozen model is copied once: what was written to the device unannounced is not kept."""
    moved = tensors()
    storages = MovedStorages(lambda: moved, CPU)
    storages.leave()
    storages.arrive()
    with torch.no_grad():
        moved[0].fill_(-1)
    storages.leave()
    storages.arrive()
    assert torch.equal(moved[0].detach(), torch.arange(100.0).view(10, 10))


def test_a_tensor_with_new_memory_is_copied() -> None:
    moved = tensors()
    storages = MovedStorages(lambda: moved, CPU)
    storages.leave()
    storages.arrive()
    moved[2].data = torch.full((7,), 3.0, dtype=torch.bfloat16)
    storages.leave()
    storages.arrive()
    assert (moved[2] == 3).all()


def test_memory_that_was_read_from_or_written_to_a_file_can_leave() -> None:
    moved = tensors()
    byte_view(moved[0])[:4] = bytes(4)
    assert give_own_storages({"x": ShardedTensor.from_rank_offsets("x", moved[1])}) is None
    storages = MovedStorages(lambda: moved, CPU)
    storages.leave()
    assert device_bytes(moved) == 0


def test_moving_twice_is_moving_once() -> None:
    moved = tensors()
    before = [x.detach().clone() for x in moved]
    storages = MovedStorages(lambda: moved, CPU)
    storages.arrive()
    storages.leave()
    storages.leave()
    storages.arrive()
    storages.arrive()
    assert all(torch.equal(x, y) for x, y in zip(moved, before))
