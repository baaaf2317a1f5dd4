"""Choose the weight transport by ``rollout.sync``."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from mppo.config.sections.rollout import RolloutConfig
from mppo.parallel import device as device_seam
from mppo.parallel.addresses import LOOPBACK, address_towards, own_address
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.server_options import HOST
from mppo.rollout.transport.broadcast import DistributedTransport
from mppo.rollout.transport.sync import (
    DiskTransport,
    TensorTransport,
    WeightTransport,
)


def make_transport(
    rollout: RolloutConfig,
    fleet: Fleet,
    device: torch.device,
    folder: Path,
    hf_folder: Path,
    rank: int,
    world: int,
) -> WeightTransport:
    """Make the transport of whole tensors; collective."""
    tensor_parallel = fleet.tensor_parallel
    if rollout.sync == "disk":
        return DiskTransport((folder / "weights").resolve(), hf_folder, writes=rank == 0)
    if rollout.sync == "distributed":
        return DistributedTransport(
            device,
            device_seam.weight_backend(),
            tensor_parallel,
            _address(rollout),
            rollout.request_timeout_s,
        )
    group = None
    if device.type != "cpu" and tensor_parallel > 1:
        # one group per server: the training ranks whose GPUs it shares; all ranks create all groups
        for first in range(0, world, tensor_parallel):
            ranks = list(range(first, first + tensor_parallel))
            made = cast("dist.ProcessGroup", dist.new_group(ranks))
            group = made if rank in ranks else group
    report = None
    if not rollout.urls:
        report = (folder / f"refused_{rank}.txt").resolve()
        report.unlink(missing_ok=True)
    checked = rollout.verify_sync == "checksum"
    return TensorTransport(device, tensor_parallel, group, report, checked)


def _address(rollout: RolloutConfig) -> str:
    """The address at which servers reach this rank: loopback if all are on this machine."""
    towards = {address_towards(urlsplit(url).hostname or HOST) for url in rollout.urls}
    if towards <= {LOOPBACK}:
        return HOST
    return towards.pop() if len(towards) == 1 else own_address()
