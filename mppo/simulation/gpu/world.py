"""Process groups of one rank without the other ranks: torch's fake process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from mppo.simulation.gpu import collectives
from mppo.simulation.gpu.counters import Counters


def install(rank: int, world_size: int, counters: Counters) -> None:
    """Create the default group and make ``new_group`` use the fake backend too.

    Object collectives return this rank's object for every rank.

    Args:
        rank: the simulated rank.
        world_size: number of ranks.
        counters: counters of the rank, for the waits of object collectives.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    plain_new_group = dist.new_group

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
    ) -> Any:
        return plain_new_group(ranks, backend="fake", group_desc=group_desc)

    def all_gather_object(outputs: list[Any], mine: Any, group: Any = None) -> None:
        counters.wait("objects")
        outputs[:] = [mine] * len(outputs)

    def broadcast_object_list(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        counters.wait("objects")

    plain_all_reduce = dist.all_reduce

    def all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        collectives.reduction[0] = op
        return plain_all_reduce(tensor, op, group, async_op)

    for module in (dist, distributed_c10d):
        replaced: Any = module
        replaced.new_group = new_group
        replaced.all_reduce = all_reduce
        replaced.all_gather_object = all_gather_object
        replaced.broadcast_object_list = broadcast_object_list
        replaced.get_backend = lambda group=None: "nccl"
