"""Megatron's own schedules in place of the executor: what all schedules are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func


@contextmanager
def megatron_schedules() -> Iterator[None]:
    """Inside, sequential updates and passes of one role run by Megatron's schedules."""
    from mppo.models.streamed_role import StreamedForward
    from mppo.trainer.update import role_update

    plain, plain_run = role_update.forward_backward, StreamedForward.run
    role_update.forward_backward, StreamedForward.run = _forward_backward, _forward
    try:
        yield
    finally:
        role_update.forward_backward, StreamedForward.run = plain, plain_run


def _forward_backward(role, mini_batch) -> dict[str, float]:
    """See ``mppo.models.streamed_role.forward_backward``."""
    from mppo.models.stage import forward_step_function
    from mppo.models.streamed_role import record_choices

    batch, plan, objective = mini_batch.batch, mini_batch.plan, mini_batch.objective
    if role.routing and role.routing.needs_record(batch, plan):
        record_choices(role, batch, plan)
    with role.groups.active():
        for stage in role.stages:
            stage.train()
        role.optimizer.zero_grad()
        microbatches = role.cut(batch, plan)
        if role.routing:
            role.routing.before_update(batch, plan, microbatches)
        head = partial(role.head, batch=batch, inputs=mini_batch.inputs)
        parts = _run(role.chunks, microbatches, forward_step_function(head, objective), role)
    return role.start_statistics(parts, objective.statistics).wait()


def _forward(passes) -> None:
    """See ``StreamedForward.run``."""
    role = passes.role
    with role.groups.active(), torch.no_grad():
        passes.parts += _run(role.stages, passes.microbatches, passes._forward_step, role, True)


def _run(chunks, microbatches, forward_step, role, forward_only: bool = False) -> list:
    """What the last stage computes for each micro-batch; on other stages an empty list."""
    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(microbatches),
            seq_length=max(role.message_shape(each)[0] for each in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
