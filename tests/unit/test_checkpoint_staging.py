"""Which saves copy the models to host memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mppo.checkpoint.writer import HostBuffers, PlannedShards


def planned(tensor: torch.Tensor, buffers: HostBuffers | None) -> PlannedShards:
    item = SimpleNamespace(index=0)
    buckets: list[Any] = [(Path("file"), "file", ([], [(item, tensor)]))]
    return PlannedShards(Path("role"), cast("Any", None), None, {}, buckets, buffers)


def test_a_save_for_which_training_waits_leaves_the_tensors_on_the_device():
    """A tensor on the device "meta" cannot be copied: the host would hold all of them at once."""
    shards = planned(torch.empty(4, device="meta"), None)
    shards.stage()
    assert shards.buckets[0][2][1][0][1].device.type == "meta"


def test_a_background_save_writes_a_copy():
    weights = torch.zeros(4)
    shards = planned(weights, HostBuffers())
    shards.stage()
    weights += 1
    shards.stage()  # the copy is made once
    assert shards.buckets[0][2][1][0][1].sum() == 0
