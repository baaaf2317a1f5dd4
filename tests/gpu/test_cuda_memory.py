"""On one GPU: memory goes back to the driver, and a rank's GPU is found on its machine."""

from __future__ import annotations

import pytest
import torch

from mppo.parallel import device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_unused_memory_goes_back_to_the_driver():
    device.give_back_memory()
    free, _ = torch.cuda.mem_get_info()
    block = torch.empty(1 << 30, dtype=torch.uint8, device=device.device())
    del block
    cached, _ = torch.cuda.mem_get_info()
    assert free - cached >= 1 << 30, "torch's allocator keeps the block"
    device.give_back_memory()
    assert torch.cuda.mem_get_info()[0] >= free


def test_copies_of_all_shapes_and_dtypes_have_their_contents():
    torch.manual_seed(0)
    made = []
    for pause in (0, 1 << 30, 1 << 30):  # cycles of the stream before the copies
        torch.cuda._sleep(pause)
        busy = torch.cuda.Event()
        busy.record()
        for _ in range(20):  # pinned memory is used again once its copy is done
            tensors = [
                torch.randint(-9, 9, shape).to(dtype)
                for dtype in (torch.int64, torch.float32, torch.int32, torch.bool)
                for shape in ((3,), (), (0,), (2, 5))
            ]
            made += zip(device.copied(tensors), [x.clone() for x in tensors], strict=True)
        assert not pause or not busy.query(), "the host waited for the stream"
    for there, here in made:
        assert there.is_cuda
        assert (there.dtype, there.shape) == (here.dtype, here.shape)
        assert torch.equal(there.cpu(), here)


def test_the_gpu_of_a_rank_is_on_its_machine():
    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    (index,) = device.gpu_indices([device.gpu_uuid()], device.gpus_of_machine())
    assert index < len(device.gpus_of_machine())
