"""What the device seam decides from the facts of a machine, and which GPUs a server gets."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
import torch.distributed as dist

from mppo.parallel import device
from mppo.parallel.device import gpu_indices, visible_gpus


@pytest.mark.parametrize(
    ("on_cuda", "by_kind"),
    [(True, {"cpu": "gloo", "cuda": "nccl"}), (False, {"cpu": "gloo"})],
)
def test_tensors_on_the_cpu_never_wait_in_a_kernel(on_cuda, by_kind):
    """torch's own reading of the setting, which process groups are made with."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(device.backends(on_cuda)))
    found = config.get_device_backend_map()
    assert {kind: str(found[kind]) for kind in by_kind} == by_kind


MACHINE = ["a1", "b2", "c3", "d4"]


@pytest.mark.parametrize(
    ("of_ranks", "indices"),
    [
        (["a1", "b2"], [0, 1]),
        (["c3", "d4"], [2, 3]),
        (["d4", "a1"], [3, 0]),  # a launcher that reverses CUDA_VISIBLE_DEVICES
        (["b2"], [1]),  # a rank that sees one GPU, as its number 0
    ],
)
def test_a_servers_gpus_are_those_of_its_ranks(of_ranks, indices):
    assert gpu_indices(of_ranks, MACHINE) == indices


@pytest.mark.parametrize(
    ("of_ranks", "why"),
    [
        (["a1", "e5"], r"the GPUs e5 are not among the 4 here"),
        (["a1", "a1"], r"several ranks share a GPU \(a1, a1\)"),
    ],
)
def test_gpus_of_another_machine_or_of_two_ranks_are_refused(of_ranks, why):
    with pytest.raises(ValueError, match=why):
        gpu_indices(of_ranks, MACHINE)


def test_the_gpus_are_given_as_integers_in_the_order_of_their_indices_on_the_bus():
    """SGLang parses the variable with ``int``."""
    found = visible_gpus([3, 0])
    assert [int(index) for index in found["CUDA_VISIBLE_DEVICES"].split(",")] == [3, 0]
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert visible_gpus([]) == {}


def test_host_memory_that_cannot_be_had_is_an_error_with_advice():
    advice = r"1048576\.0 GiB of host memory .* --dry-run; .* offload less \(megatron\.offload\)"
    with pytest.raises(MemoryError, match=advice):
        device.pinned_memory(1 << 50)


def test_blocks_of_host_memory_share_no_page():
    """CUDA pins whole pages and refuses to pin one twice."""
    blocks = [device.pinned_memory(100) for _ in range(50)]
    pages = {block.data_ptr() // mmap.PAGESIZE for block in blocks}
    assert len(pages) == len(blocks)
    assert all(block.data_ptr() % mmap.PAGESIZE == 0 for block in blocks)


def test_host_memory_lives_as_long_as_a_view_of_it():
    view = device.pinned_memory(1 << 16)[1 << 12 :].view(torch.float32).fill_(3.0)
    gc.collect()
    assert view.sum() == 3.0 * view.numel()
