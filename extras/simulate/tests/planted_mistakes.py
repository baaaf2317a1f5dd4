"""Mistakes between ranks. Each function makes one in a simulated rank's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Args:
        program: name of the program into which it is planted.
        ranks: the ranks that make it.
        make: makes it in a rank's process.
        early: it is made before the roles are built; else before the update.
    """

    program: str
    ranks: tuple[int, ...]
    make: Callable[[], None]
    early: bool


MISTAKES: dict[str, Mistake] = {}


def planted(
    program: str, *ranks: int, early: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a function to ``MISTAKES``."""

    def add(make: Callable[[], None]) -> Callable[[], None]:
        MISTAKES[make.__name__] = Mistake(program, ranks, make, early)
        return make

    return add


@planted("two roles", 2)
def gradient_sent_twice() -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_gradient
    Links.send_gradient = lambda self, message: (plain(self, message), plain(self, message))[0]


@planted("two roles", 2)
def gradient_sent_in_another_group() -> None:
    from mppo.pipeline import links

    plain = links.route

    def route(kind: Any, stage: int, stages: int) -> Any:
        found = plain(kind, stage, stages)
        return found._replace(group="pp") if kind == "send_gradient" else found

    links.route = route


@planted("two roles", 2)
def gradient_sent_in_float32() -> None:
    from mppo.pipeline.links import Links

    plain = Links.send_gradient
    Links.send_gradient = lambda self, message: plain(self, message.float())


@planted("two roles", 0)
def gradient_received_into_another_micro_batch() -> None:
    from mppo.models.streamed_role import StreamedRole

    plain = StreamedRole.receive_buffer
    StreamedRole.receive_buffer = lambda self, i, j: plain(self, i, max(j - 1, 0))


@planted("two roles", 0, 2)
def sends_awaited_at_once() -> None:
    from mppo.pipeline.links import Links

    plain = Links.__init__

    def init(self: Any, *args: Any) -> None:
        plain(self, *args)
        self._kept_outputs = self._kept_gradients = 0

    Links.__init__ = init


@planted("two roles", 0, 2)
def device_awaited_with_a_posted_receive() -> None:
    from mppo.pipeline.links import Links

    plain = Links._start

    def start(self: Any, *args: Any) -> Any:
        work = plain(self, *args)
        torch.cuda.synchronize()
        return work

    Links._start = start


@planted("two roles", 0, 2)
def receives_posted_a_pass_early() -> None:
    from mppo.pipeline import schedule

    plain = schedule._with_messages

    def with_messages(*args: Any) -> Any:
        actions = plain(*args)
        for at, action in enumerate(actions):
            if action.kind.startswith("receive"):
                before = at
                while before and actions[before - 1].kind not in ("forward", "backward", "step"):
                    before -= 1
                if before and actions[before - 1].kind != "step":
                    actions.insert(before - 1, actions.pop(at))
        return actions

    schedule._with_messages = with_messages


@planted("interleaved", 0, 1)
def objects_gathered_in_a_pass() -> None:
    from mppo.models.streamed_role import StreamedRole
    from mppo.parallel.collectives import all_gather_objects

    def gathering(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            all_gather_objects(len(args))
            return plain(*args)

        return call

    StreamedRole.forward = gathering(StreamedRole.forward)
    StreamedRole.backward = gathering(StreamedRole.backward)


@planted("interleaved", 0, 1, early=True)
def directions_share_a_group() -> None:
    from mppo.parallel import groups

    groups.PIPELINE_WRAP = groups.PIPELINE_WRAP_BACK = groups.PIPELINE_BACK


@planted("two roles", 1)
def maximum_instead_of_sum() -> None:
    plain = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.float64 and kwargs.get("async_op"):
            args = (dist.ReduceOp.MAX,)
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


@planted("two roles", 1)
def roles_in_another_order() -> None:
    from mppo.trainer.update.update_stage import UpdatePhase

    plain = UpdatePhase.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.updates.reverse()

    UpdatePhase.__init__ = init


@planted("two roles", 1)
def update_ended_by_one_rank() -> None:
    from mppo.supervision.stop_request import StepInterrupted
    from mppo.trainer.update.streamed import StreamedUpdate
    from mppo.trainer.update.update_stage import UpdatePhase

    plain = StreamedUpdate.take_step

    def take_step(self: Any, *args: Any) -> bool:
        return plain(self, *args) and self._taken < 2

    StreamedUpdate.take_step = take_step
    run = UpdatePhase.run

    def run_to_the_end(self: Any) -> None:
        with suppress(StepInterrupted):
            run(self)

    UpdatePhase.run = run_to_the_end


@planted("one role", 0)
def barrier_of_the_first_rank() -> None:
    from mppo.trainer.update.update_stage import UpdatePhase

    plain = UpdatePhase.metrics

    def metrics(self: Any) -> Any:
        if dist.get_rank() == 0:
            dist.barrier()
        return plain(self)

    UpdatePhase.metrics = metrics


@planted("one role", 1)
def norm_summed_over_replicas() -> None:
    from megatron.core import parallel_state

    from mppo.models.optimizer import RoleOptimizer

    plain = RoleOptimizer.start_norm

    def start_norm(self: Any) -> Any:
        for part in self._chained():
            part.get_grad_stats_parallel_group = parallel_state.get_data_parallel_group
        return plain(self)

    RoleOptimizer.start_norm = start_norm


@planted("one role", 2)
def bucket_broadcast_from_another_stage() -> None:
    plain = dist.broadcast
    dist.broadcast = lambda content, source, group: plain(content, 2 - source, group=group)


@planted("one role", 2)
def fewer_micro_batches_on_a_stage() -> None:
    from mppo.trainer.update import role_update

    plain = role_update.forward_backward

    def forward_backward(role: Any, mini_batch: Any) -> Any:
        joined = [[[*chain(*part)]] if len(part) == 2 else part for part in mini_batch.plan]
        return plain(role, replace(mini_batch, plan=joined))

    role_update.forward_backward = forward_backward


@planted("mixture", 1)
def rows_to_and_from_experts_exchanged() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    plain = token_dispatcher.all_to_all
    token_dispatcher.all_to_all = lambda group, x, to=None, by=None: plain(group, x, by, to)


@planted("mixture", 1, early=True)
def experts_reduced_over_all_replicas() -> None:
    from megatron.core import parallel_state

    def group(*args: Any, **kwargs: Any) -> Any:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    parallel_state.get_expert_data_parallel_group = group


@planted("mixture", 0, 1)
def ring_without_a_batch() -> None:
    from mppo.models.attention import ring

    def one_by_one(operations: Any) -> Any:
        return [x.op(x.tensor, x.peer, x.group) for x in operations]

    ring.dist = SimpleNamespace(**vars(dist) | {"batch_isend_irecv": one_by_one})


@planted("one role", 0)
def tokens_left_on_the_host() -> None:
    from mppo.models import role

    plain = role.cut
    role.cut = lambda *args: replace(plain(*args), tokens_t=plain(*args).tokens_t.cpu())
