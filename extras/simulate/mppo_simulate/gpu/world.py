"""Process groups of one rank without the other ranks: torch's fake process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.gpu.streams import follow_works


def install(rank: int, world_size: int, counters: Counters, recorder: RankRecorder) -> None:
    """Create the default group and make ``new_group`` use the fake backend too.

    Object collectives return this rank's object for every rank.

    Args:
        rank: the simulated rank.
        world_size: number of ranks.
        counters: counters of the rank, for the waits of object collectives.
        recorder: recorder of the rank.
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
        counters.count_wait("objects")
        recorder.objects("all_gather_object", group)
        outputs[:] = [mine] * len(outputs)

    def broadcast_object_list(
        objects: list[Any], src: Any = None, group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        counters.count_wait("objects")
        among: Any = group or dist.group.WORLD
        root = kwargs.get("group_src") or 0 if src is None else dist.get_group_rank(among, src)
        recorder.objects("broadcast_object_list", group, (("from", root),))

    for module in (dist, distributed_c10d):
        replaced: Any = module
        replaced.new_group = new_group
        replaced.all_gather_object = all_gather_object
        replaced.broadcast_object_list = broadcast_object_list
        replaced.get_backend = lambda group=None: "nccl"
    follow_works(recorder)
