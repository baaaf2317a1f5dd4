"""A role in a schedule: the passes of one micro-batch, and the parts of its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from mppo.models.configuration import finalize_gradients
from mppo.models.microbatch import MicroBatch
from mppo.models.optimizer import PendingNorm
from mppo.models.role import PendingStatistics, Role, run_chunk
from mppo.models.role_spec import MiniBatch
from mppo.pipeline.sequential import forward_step_function


@dataclass
class _Running:
    """A mini-batch on this rank, from its first forward pass to its step.

    Args:
        number: of the mini-batch.
        microbatches: this rank's.
        forward_step: what Megatron calls for a forward pass.
        unsynchronised: while it is open, a backward pass reduces no gradient.
        held: input and output of the forward passes whose backward passes are to come.
        parts: losses and statistics of the micro-batches, on the last stage.
    """

    number: int
    microbatches: list[MicroBatch]
    forward_step: Callable
    unsynchronised: ExitStack
    held: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)


class StreamedRole:
    """What a role does in an update, for the executor (``StageWork``).

    Megatron's own functions compute the passes and complete the gradient; the role's layout is
    active meanwhile only. The layout is not interleaved.

    Args:
        role: a role that learns.
        mini_batches: make the mini-batch of each step, when its first pass begins.
        would_leave: whether this rank would leave the update; asked with every norm.
    """

    def __init__(
        self,
        role: Role,
        mini_batches: Sequence[Callable[[], MiniBatch]],
        would_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        assert role.layout.vpp == 1
        self.role = role
        self._mini_batches, self._would_leave = mini_batches, would_leave
        assert role.optimizer is not None, f"{role.name} is frozen"
        self._optimizer = role.optimizer
        (chunk,) = role.chunks
        self._chunk = cast("DistributedDataParallel", chunk)
        self._running: _Running | None = None
        self._pending: tuple[PendingNorm, PendingStatistics] | None = None

    def room(self, mini_batch: int, micro_batch: int) -> Tensor:
        """See ``ForwardWork``."""
        return self.role.message_room(self._begun(mini_batch).microbatches[micro_batch])

    def forward(self, mini_batch: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """See ``ForwardWork``."""
        run, config = self._begun(mini_batch), self.role.config
        if received is not None:
            received.requires_grad_()
        with self.role.groups.active(), torch.enable_grad():
            output, _ = schedules.forward_step(
                run.forward_step,
                iter([run.microbatches[micro_batch]]),
                self._chunk,
                len(run.microbatches),
                received,
                run.parts,
                config,
                self.role.layout.cp,
                current_microbatch=micro_batch,
                is_last_stage=self.role.groups.is_last_stage,
            )
        output = cast("Tensor", output)
        run.held[micro_batch] = received, output
        if self.role.groups.is_last_stage:
            return None
        message = output.detach()
        # autograd needs the output's history, and only the message its values
        schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        return message

    def backward(self, mini_batch: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """See ``StageWork``."""
        run = self._begun(mini_batch)
        taken, output = run.held.pop(micro_batch)
        with self.role.groups.active():
            gradient = schedules.backward_step(
                taken, output, received, get_model_type(self._chunk), self.role.config
            )
        return None if taken is None else cast("Tensor", gradient).contiguous()

    def reduce(self, mini_batch: int) -> None:
        """Begin to reduce the gradient, where the recipe wants that behind the computation."""
        run = self._begun(mini_batch)
        run.unsynchronised.close()
        if self._chunk.ddp_config.overlap_grad_reduce:
            with self.role.groups.active():
                self._chunk.start_grad_sync()

    def norm(self, mini_batch: int) -> None:
        """Complete the gradient as Megatron does, and begin to sum its norm and the statistics."""
        run, role = self._begun(mini_batch), self.role
        with role.groups.active():
            finalize_gradients([self._chunk], None)
            norm = self._optimizer.start_norm()
        statistics = role.start_statistics(run.parts, self._would_leave())
        self._running, self._pending = None, (norm, statistics)

    def wait(self) -> tuple[float, dict[str, float], bool]:
        """Norm and statistics of the gradient that was completed last, the same on every rank; and
        whether any rank would leave the update. The role's ``loss`` is then the mini-batch's."""
        assert self._pending is not None, "norm comes first"
        norm, statistics = self._pending
        self._pending = None
        sums = statistics.wait()
        return norm.wait(), sums, statistics.leave

    def _begun(self, number: int) -> _Running:
        """The mini-batch that runs; begins it, with gradient zero, where none does."""
        if self._running is None:
            self._running = self._begin(number)
        assert self._running.number == number
        return self._running

    def _begin(self, number: int) -> _Running:
        role, mini_batch = self.role, self._mini_batches[number]()
        with role.groups.active():
            for stage in role.stages:
                stage.train()
            self._optimizer.zero_grad()
            microbatches = role.cut(mini_batch.batch, mini_batch.plan)
            if role.routing:
                role.routing.before_update(mini_batch.batch, mini_batch.plan, microbatches)
        head = partial(role.head, batch=mini_batch.batch, inputs=mini_batch.inputs)
        forward_step = forward_step_function(run_chunk, head, mini_batch.objective)
        unsynchronised = ExitStack()
        unsynchronised.enter_context(self._chunk.no_sync())
        return _Running(number, microbatches, forward_step, unsynchronised)
