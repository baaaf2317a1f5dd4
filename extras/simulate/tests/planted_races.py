"""Mistakes between streams. Each function makes one in a simulated rank's process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from planted_mistakes import planted


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


@planted("one role", 0)
def offload_without_record_stream() -> None:
    from mppo.parallel.moved_storages import CopyLane

    without(CopyLane, "copy", torch.Tensor, "record_stream")


@planted("one role", 0)
def activations_stored_without_record_stream() -> None:
    from mppo.parallel.host_copies import HostCopier

    without(HostCopier, "store", torch.Tensor, "record_stream")


@planted("one role", 0)
def activations_used_before_they_are_back() -> None:
    from mppo.parallel.host_copies import Fetched

    Fetched.wait = lambda self: self.tensor


@planted("one role", 0, early=True)
def parts_used_before_they_arrive() -> None:
    from mppo.parallel.moved_storages import MovedStorages

    MovedStorages.wait = lambda self: None


@planted("one role", 0)
def parts_copied_before_they_are_written() -> None:
    from mppo_simulate.gpu.streams import CudaStream

    from mppo.parallel.moved_storages import CopyLane

    without(CopyLane, "copy", CudaStream, "wait_stream")


@planted("one role", 0)
def bucket_handed_over_before_it_is_copied() -> None:
    from mppo.rollout.transport.buckets import SharedBuffer

    without(SharedBuffer, "fill_bytes", torch.accelerator, "synchronize")


@planted("one role", 0)
def bucket_copied_before_its_broadcast_ends() -> None:
    plain = dist.broadcast
    dist.broadcast = lambda *args, **kwargs: plain(*args, **kwargs, async_op=True)


@planted("two roles", 0)
def norm_before_the_reduction() -> None:
    from mppo.models import streamed_role

    streamed_role.finalize_gradients = lambda *args: None


@planted("one role", 0)
def norm_read_before_its_sum() -> None:
    from mppo.models.optimizer import PendingNorm

    plain = PendingNorm.wait

    def wait(self: Any) -> float:
        self.works.clear()
        return plain(self)

    PendingNorm.wait = wait


def _forget_gathers(self: Any) -> None:
    for chunk in self._chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.param_gather_handle = None


@planted("two roles", 0)
def weights_used_before_they_are_gathered() -> None:
    from mppo.models.optimizer import RoleOptimizer

    RoleOptimizer.wait_for_weights = _forget_gathers


@planted("one role", 0)
def weights_sent_before_they_are_gathered() -> None:
    from mppo.models.optimizer import RoleOptimizer
    from mppo.trainer.update import role_update

    await_weights, plain = RoleOptimizer.wait_for_weights, role_update.forward_backward
    RoleOptimizer.wait_for_weights = lambda self: None

    def forward_backward(role: Any, mini_batch: Any) -> Any:
        await_weights(role.optimizer)
        return plain(role, mini_batch)

    role_update.forward_backward = forward_backward


@planted("two roles", 0)
def gradients_reduced_before_the_last_pass() -> None:
    from mppo.models.streamed_role import StreamedRole

    plain = StreamedRole.backward

    def backward(self: Any, mini_batch: int, micro_batch: int, *rest: Any) -> Any:
        if micro_batch == len(self._start_once(mini_batch).microbatches) - 1:
            for chunk in self._chunks:
                chunk.start_grad_sync()
        return plain(self, mini_batch, micro_batch, *rest)

    StreamedRole.backward = backward
    StreamedRole.reduce = lambda self, mini_batch: None


@planted("two roles", 0)
def message_used_before_it_arrives() -> None:
    from mppo.pipeline.links import Arriving

    Arriving.wait = lambda self: self.tensor


@planted("two roles", 2)
def message_buffer_reused_before_it_is_sent() -> None:
    from mppo.pipeline.links import Links

    plain, buffers = Links.send_gradient, []

    def send_gradient(self: Any, message: Any) -> None:
        if not buffers or buffers[-1].numel() < message.numel():
            buffers.append(message.new_empty(2 * message.numel()))
        plain(self, buffers[-1][: message.numel()].view_as(message).copy_(message))

    Links.send_gradient = send_gradient


@planted("interleaved", 0, 1, early=True)
def outputs_freed_while_they_are_sent() -> None:
    from mppo.models import configuration
    from mppo.pipeline.links import Links

    plain = configuration.fields_set
    configuration.fields_set = lambda *args, **kwargs: {
        **plain(*args, **kwargs), "deallocate_pipeline_outputs": True,
    }  # fmt: skip
    send = Links.send_output

    def send_output(self: Any, message: Any) -> None:
        send(self, message)
        message.data = message.new_empty(1)

    Links.send_output = send_output


@planted("one role", 2)
def numbers_read_before_they_are_copied() -> None:
    torch.Tensor.cpu = lambda self: self.to("cpu", non_blocking=True)


@planted("one role", 0)
def pinned_tokens_overwritten_while_they_are_copied() -> None:
    from mppo.models import role

    plain, pinned = role.cut, []

    def cut(*args: Any) -> Any:
        found = plain(*args)
        moved = [x.cpu() for x in (found.tokens_t, found.target_N)]
        if not pinned:
            pinned.append(torch.zeros(4096, dtype=moved[0].dtype, pin_memory=True))
        tokens_t, target_N = (
            pinned[0][: len(x)].copy_(x).to("cuda", non_blocking=True) for x in moved
        )
        return replace(found, tokens_t=tokens_t, target_N=target_N)

    role.cut = cut


@planted("one role", 0)
def weights_leave_before_they_are_sent() -> None:
    from mppo.planning.residency import GENERATION
    from mppo.trainer.role_moves import RolePlacement

    @contextmanager
    def sending_weights(self: Any) -> Any:
        self.enter(GENERATION)
        yield

    RolePlacement.sending_weights = sending_weights


@planted("one role", 0)
def gradients_leave_before_the_step() -> None:
    from mppo.models.optimizer import RoleOptimizer

    plain = RoleOptimizer.apply

    def apply(self: Any, norm: float) -> None:
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        plain(self, norm)
        self.gradients.arrive()

    RoleOptimizer.apply = apply
