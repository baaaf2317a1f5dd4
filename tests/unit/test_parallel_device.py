"""What the device seam decides from the facts of a machine."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mppo.parallel import device


@pytest.mark.parametrize(
    ("on_cuda", "by_kind"),
    [(True, {"cpu": "gloo", "cuda": "nccl"}), (False, {"cpu": "gloo"})],
)
def test_tensors_on_the_cpu_never_wait_in_a_kernel(on_cuda, by_kind):
    """torch's own reading of the setting, which process groups are made with."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(device.backends(on_cuda)))
    found = config.get_device_backend_map()
    assert {kind: str(found[kind]) for kind in by_kind} == by_kind
