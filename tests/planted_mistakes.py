"""Mistakes between ranks and streams. Each function makes one in a simulated rank's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _stage_1(rank: int) -> bool:
    return rank >= 2


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


def _wait_stream_left_out(owner: Any, method: str) -> None:
    from mppo.simulation.gpu.streams import CudaStream

    without(owner, method, CudaStream, "wait_stream")


def offload_without_record_stream(rank: int) -> None:
    from mppo.parallel.moved_storages import CopyLane

    without(CopyLane, "copy", torch.Tensor, "record_stream")


def parts_leave_before_they_are_computed(rank: int) -> None:
    from mppo.parallel.moved_storages import CopyLane

    _wait_stream_left_out(CopyLane, "copy")


def parts_used_before_they_arrive(rank: int) -> None:
    from mppo.parallel.moved_storages import MovedStorages

    MovedStorages.wait = lambda self: None


def activations_without_record_stream(rank: int) -> None:
    from mppo.parallel.host_copies import HostCopier

    without(HostCopier, "store", torch.Tensor, "record_stream")


def activations_stored_before_they_are_computed(rank: int) -> None:
    from mppo.parallel.host_copies import HostCopier

    _wait_stream_left_out(HostCopier, "store")


def activations_used_before_they_arrive(rank: int) -> None:
    from mppo.parallel.host_copies import Fetched

    Fetched.wait = lambda self: self.tensor


def bucket_handed_over_before_it_is_copied(rank: int) -> None:
    from mppo.rollout.transport.buckets import SharedBuffer

    SharedBuffer._synchronize = lambda self: None


def norm_before_the_reduction(rank: int) -> None:
    from mppo.models import streamed_role

    streamed_role.finalize_gradients = lambda *args: None


def message_used_before_it_arrives(rank: int) -> None:
    from mppo.pipeline.links import Arriving

    Arriving.wait = lambda self: self.tensor


def message_overwritten_while_it_is_sent(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_output

    def send(self: Any, message: Any) -> None:
        plain(self, message)
        message.zero_()

    Links.send_output = send


def output_freed_while_it_is_sent(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_output

    def send(self: Any, message: Any) -> None:
        plain(self, message)
        message.data = torch.empty(1, device=message.device, dtype=message.dtype)

    Links.send_output = send


def gradients_sent_in_another_group(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links._connect

    def connect(self: Any) -> None:
        plain(self)
        if _stage_1(rank):
            self._to_before = self._from_before

    Links._connect = connect


def output_sent_without_its_last_token(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_output
    Links.send_output = lambda self, message: plain(
        self, message[:-1] if len(message) > 1 else message
    )


def gradient_sent_twice(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_gradient
    Links.send_gradient = lambda self, message: (plain(self, message), plain(self, message))[0]


def outputs_sent_in_another_order(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain, calls = Links.send_output, []

    def send(self: Any, message: Any) -> None:
        calls.append(message)
        if len(calls) == 3:
            plain(self, message)
            plain(self, calls[1])
        elif len(calls) != 2:  # the first one is that of ``_connect``
            plain(self, message)

    Links.send_output = send


def micro_batches_in_another_order(rank: int) -> None:
    from mppo.models.streamed_role import StreamedRole

    if _stage_1(rank):
        plain = StreamedRole._start_once

        def start(self: Any, mini_batch: int) -> Any:
            run = plain(self, mini_batch)
            if not hasattr(run, "turned"):
                run.turned = True
                run.microbatches.reverse()
            return run

        StreamedRole._start_once = start


def reduction_left_out(rank: int) -> None:
    from megatron.core.distributed import DistributedDataParallel

    if rank == 1:
        DistributedDataParallel.start_grad_sync = lambda self, *args: None
        DistributedDataParallel.finish_grad_sync = lambda self, *args, **kwargs: None


def _statistics(change: Callable[..., Any]) -> None:
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_statistics = tensor.dtype is torch.float64 and kwargs.get("async_op")
        return change(plain, tensor, **kwargs) if is_statistics else plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def maximum_instead_of_sum(rank: int) -> None:
    if rank == 1:
        _statistics(lambda plain, x, **kwargs: plain(x, dist.ReduceOp.MAX, **kwargs))


def sum_in_another_type(rank: int) -> None:
    if rank == 1:
        _statistics(lambda plain, x, **kwargs: plain(x.float(), **kwargs))


def weights_from_another_rank(rank: int) -> None:
    plain = dist.broadcast

    def broadcast(tensor: Any, src: int = 0, group: Any = None, **kwargs: Any) -> Any:
        return plain(tensor, dist.get_rank(), group, **kwargs)

    if _stage_1(rank):
        dist.broadcast = broadcast


def group_made_on_one_rank_only(rank: int) -> None:
    from mppo.parallel.groups import LayoutGroups

    plain = LayoutGroups.__init__

    def init(self: Any, *args: Any) -> None:
        if rank == 1:
            dist.new_group([0, 1])
        plain(self, *args)

    LayoutGroups.__init__ = init


def exchange_of_another_size(rank: int) -> None:
    plain = dist.all_to_all_single

    def exchange(output: Any, given: Any, to: Any = None, by: Any = None, **kwargs: Any) -> Any:
        by = [*by[:-1], by[-1] + 1]
        given = torch.cat([given, given[:1]]) if len(given) else given.new_zeros(1)
        return plain(output, given, to, by, **kwargs)

    if rank == 1:
        dist.all_to_all_single = exchange


def device_awaited_with_a_receive_posted(rank: int) -> None:
    from mppo.parallel import device
    from mppo.pipeline.links import Links

    for name in ("receive_input", "receive_gradient"):
        plain = getattr(Links, name)

        def receive(self: Any, buffer: Any, plain: Any = plain) -> Any:
            found = plain(self, buffer)
            if hasattr(self, "connected"):
                device.synchronize()
            return found

        setattr(Links, name, receive)
    plain_connect = Links._connect

    def connect(self: Any) -> None:
        plain_connect(self)
        self.connected = True

    Links._connect = connect


def sends_awaited_at_once(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        self._kept_outputs = self._kept_gradients = 0

    Links.__init__ = init


def statistics_awaited_at_once(rank: int) -> None:
    def at_once(plain: Any, tensor: Any, **kwargs: Any) -> Any:
        work = plain(tensor, **kwargs)
        work.wait()
        return work

    _statistics(at_once)


def both_directions_in_one_group(rank: int) -> None:
    from mppo.pipeline.links import Links

    plain = Links._connect

    def connect(self: Any) -> None:
        self._from_after = self._to_after
        self._to_before = self._from_before
        plain(self)

    Links._connect = connect


RACES = (
    offload_without_record_stream, parts_leave_before_they_are_computed,
    parts_used_before_they_arrive, activations_without_record_stream,
    activations_stored_before_they_are_computed, activations_used_before_they_arrive,
    bucket_handed_over_before_it_is_copied, norm_before_the_reduction,
    message_used_before_it_arrives, message_overwritten_while_it_is_sent,
    output_freed_while_it_is_sent,
)  # fmt: skip
BETWEEN_STAGES = (
    gradients_sent_in_another_group, output_sent_without_its_last_token, gradient_sent_twice,
    outputs_sent_in_another_order, micro_batches_in_another_order, weights_from_another_rank,
    device_awaited_with_a_receive_posted, sends_awaited_at_once, statistics_awaited_at_once,
    both_directions_in_one_group,
)  # fmt: skip
BETWEEN_REPLICAS = (
    reduction_left_out, maximum_instead_of_sum, sum_in_another_type, group_made_on_one_rank_only,
    exchange_of_another_size,
)  # fmt: skip
