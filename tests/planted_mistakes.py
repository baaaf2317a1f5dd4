"""Mistakes between ranks and streams. Each function makes one in a simulated rank's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def without(owner: Any, method: str, target: Any, name: str) -> None:
    """Make a method do nothing where it calls ``target.name``."""
    plain = getattr(owner, method)

    def call(self: Any, *args: Any) -> Any:
        before = getattr(target, name)
        setattr(target, name, lambda *args: None)
        try:
            return plain(self, *args)
        finally:
            setattr(target, name, before)

    setattr(owner, method, call)


def offload_without_record_stream(rank: int) -> None:
    from mppo.parallel.moved_storages import CopyLane

    without(CopyLane, "copy", torch.Tensor, "record_stream")


def parts_used_before_they_arrive(rank: int) -> None:
    from mppo.parallel.moved_storages import MovedStorages

    MovedStorages.wait = lambda self: None


def bucket_handed_over_before_it_is_copied(rank: int) -> None:
    from mppo.rollout.transport.buckets import SharedBuffer

    SharedBuffer._synchronize = lambda self: None


def norm_before_the_reduction(rank: int) -> None:
    from mppo.models import streamed_role

    streamed_role.finalize_gradients = lambda *args: None


def message_used_before_it_arrives(rank: int) -> None:
    from mppo.pipeline.links import Arriving

    Arriving.wait = lambda self: self.tensor


def gradient_sent_twice(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_gradient
    Links.send_gradient = lambda self, message: (plain(self, message), plain(self, message))[0]


def _statistics(change: Callable[..., Any]) -> None:
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_statistics = tensor.dtype is torch.float64 and kwargs.get("async_op")
        return change(plain, tensor, **kwargs) if is_statistics else plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def maximum_instead_of_sum(rank: int) -> None:
    if rank == 1:
        _statistics(lambda plain, x, **kwargs: plain(x, dist.ReduceOp.MAX, **kwargs))


def sends_awaited_at_once(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        self._kept_outputs = self._kept_gradients = 0

    Links.__init__ = init


RACES = (
    offload_without_record_stream, parts_used_before_they_arrive,
    bucket_handed_over_before_it_is_copied, norm_before_the_reduction,
    message_used_before_it_arrives,
)  # fmt: skip
BETWEEN_STAGES = (gradient_sent_twice, sends_awaited_at_once)
BETWEEN_REPLICAS = (maximum_instead_of_sum,)
