"""Passes and optimizer steps of a role by the executor, one micro-batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.head_outputs import HeadOutputs, num_outputs, unstack_outputs
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.mini_batch import TOKENS_ONLY, MiniBatch, PassInputs
from mppo.models.configuration import finalize_gradients
from mppo.models.microbatch import MicroBatch
from mppo.models.optimizer import PendingNorm
from mppo.models.role import PendingStatistics, Role
from mppo.models.stage import forward_step_function
from mppo.models.work_share import PassMoves, output_rows, return_home, sum_states
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import forward_list
from mppo.pipeline.schedule_checks import checked_schedule


class StreamedForward:
    """A role's forward pass over a batch; implements ``ForwardWork`` of the executor. In the lists,
    all micro-batches belong to mini-batch 0. On the last stage ``finish`` computes what ``parts``
    keep of a micro-batch from its hidden states; None: the head's outputs."""

    def __init__(
        self,
        role: Role,
        batch: Sequences,
        plan: MicroBatchPlan,
        inputs: PassInputs = TOKENS_ONLY,
        finish: Callable[[Tensor, MicroBatch], Any] | None = None,
    ) -> None:
        self.role, self._batch, self._plan, self._inputs = role, batch, plan, inputs
        self.microbatches = role.begin_forward(batch, plan)
        finish = finish or partial(role.head, batch=batch, inputs=inputs)
        self._forward_step = forward_step_function(finish, None)
        self.parts: list[Any] = []

    @property
    def work(self) -> RoleWork:
        return RoleWork(self.role.name, (len(self.microbatches),), chunks=self.role.layout.vpp)

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> Tensor:
        return self.role.message_buffer(self.microbatches[micro_batch])

    def forward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        is_last = self.role.is_last_chunk(chunk)
        with self.role.groups.active(), torch.no_grad():
            output, _ = schedules.forward_step(
                self._forward_step,
                iter([self.microbatches[micro_batch]]),
                self.role.stages[chunk],
                len(self.microbatches),
                received,
                self.parts,
                self.role.config,
                self.role.layout.cp,
                collect_non_loss_data=True,
                current_microbatch=micro_batch,
                vp_stage=self.role.stages[chunk].vp_stage,
                is_last_stage=is_last,
            )
        assert isinstance(output, Tensor)
        return None if is_last else output

    def run(self) -> None:
        """Compute all passes of this role alone. Collective."""
        links = Links([self.role.groups])
        actions = forward_list([self.work], links.stage, links.stages)
        carry_out(actions, {self.role.name: self}, links)

    def outputs(self, parts: list[HeadOutputs] | None = None) -> HeadOutputs:
        """The head's outputs in the form of :func:`forward`, once all passes ran; ``parts`` are
        those of the micro-batches, if ``finish`` returned more. Collective."""
        role, batch = self.role, self._batch
        role.end_forward(batch, self._plan, self.microbatches)
        asked = self._inputs
        with_kl = asked.ref_hidden_T is not None
        count = num_outputs(role.settings.head, with_kl, asked.with_squares)
        parts = self.parts if parts is None else parts
        rows_Tk = output_rows(batch, self.microbatches, parts, count)
        home_Tk = return_home(batch, PassMoves(role.layout, self._plan, batch), rows_Tk)
        return unstack_outputs(role.settings.head, home_Tk.T.contiguous())


def forward(
    role: Role, batch: Sequences, plan: MicroBatchPlan, inputs: PassInputs = TOKENS_ONLY
) -> HeadOutputs:
    """Compute a role's outputs for a batch, without gradients. Collective. The batch holds the
    sequences that this rank works on (``Role.fetch``). Outputs are those of sequences at home here,
    float32 ``[T]`` on the CPU, 0 outside responses and the plan."""
    passes = StreamedForward(role, batch, plan, inputs)
    passes.run()
    return passes.outputs()


def forward_with_states(
    role: Role, batch: Sequences, plan: MicroBatchPlan
) -> tuple[HeadOutputs, Tensor]:
    """Compute the outputs of :func:`forward` and, for each response token at home here, the hidden
    state that predicts it, ``[T, hidden]`` in the parameters' dtype. Collective."""

    def outputs_and_states(hidden: Tensor, microbatch: MicroBatch) -> tuple[HeadOutputs, Tensor]:
        outputs = role.head(hidden, microbatch, batch, TOKENS_ONLY)
        return outputs, role.head.predicting_states(hidden, microbatch).cpu()

    passes = StreamedForward(role, batch, plan, finish=outputs_and_states)
    passes.run()
    home = passes.outputs([outputs for outputs, _ in passes.parts])
    hidden_T = torch.zeros(len(batch.tokens_T), role.config.hidden_size, dtype=role.dtype)
    if role.groups.is_last_stage and role.groups.coordinates.tp == 0:
        for microbatch, (_, hidden_N) in zip(passes.microbatches, passes.parts):
            hidden_T[microbatch.predicted_in(batch)] = hidden_N
        if role.layout.cp > 1:
            sum_states(hidden_T, role.groups.cp)
    return home, return_home(batch, PassMoves(role.layout, plan, batch), hidden_T)


def record_choices(role: Role, batch: Sequences, plan: MicroBatchPlan) -> None:
    """Run a pass in which the routers record their choices of experts. Collective."""
    passes = StreamedForward(role, batch, plan)
    passes.run()
    role.end_forward(batch, plan, passes.microbatches)


@dataclass
class _RunningMiniBatch:
    """The state of a mini-batch on this rank, from its first forward pass to its "norm". DDP's
    ``no_sync`` of each chunk is ``unsynchronised``: while open, backward passes reduce no gradient.
    ``left`` counts each chunk's backward passes that have not begun. ``activations`` are input and
    output of each forward pass without a backward pass so far, by micro-batch and chunk."""

    number: int
    microbatches: list[MicroBatch]
    forward_step: Callable
    statistics: tuple[str, ...]
    unsynchronised: list[ExitStack]
    left: list[int]
    activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)


class StreamedRole:
    """The update of a role on this stage; implements ``StageWork`` of the executor.

    Megatron's functions compute the passes and complete the gradient. The role's layout is active
    only during these calls. ``wants_to_stop`` is called at every "norm". ``alone``: no other role
    is in the lists; with ``overlap_grad_reduce`` the last backward pass of a mini-batch then
    reduces gradients as it computes them, else "reduce" does.
    """

    def __init__(
        self,
        role: Role,
        mini_batches: deque[MiniBatch],
        wants_to_stop: Callable[[], bool] = lambda: False,
        alone: bool = False,
    ) -> None:
        self.role, self._alone = role, alone
        self._mini_batches, self._wants_to_stop = mini_batches, wants_to_stop
        assert role.optimizer is not None, f"{role.name} is frozen"
        self._optimizer = role.optimizer
        self._chunks = [cast("DistributedDataParallel", chunk) for chunk in role.chunks]
        self._running: _RunningMiniBatch | None = None
        self._next: list[MicroBatch] | None = None
        self._pending: tuple[PendingNorm, PendingStatistics] | None = None

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> Tensor:
        """The mini-batch does not start here: a send may be about to follow."""
        if self._running is not None and self._running.number == mini_batch:
            return self.role.message_buffer(self._running.microbatches[micro_batch])
        return self.role.message_buffer(self._cut_next()[micro_batch])

    def forward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        run, config = self._start_once(mini_batch), self.role.config
        is_last = self.role.is_last_chunk(chunk)
        if received is not None:
            received.requires_grad_()
        with self.role.groups.active(), torch.enable_grad():
            output, _ = schedules.forward_step(
                run.forward_step,
                iter([run.microbatches[micro_batch]]),
                self._chunks[chunk],
                len(run.microbatches),
                received,
                run.parts,
                config,
                self.role.layout.cp,
                current_microbatch=micro_batch,
                vp_stage=self.role.stages[chunk].vp_stage,
                is_last_stage=is_last,
            )
        output = cast("Tensor", output)
        run.activations[micro_batch, chunk] = received, output
        if is_last:
            return None
        message = output.detach()
        # autograd needs only the history of the output; its values are in the message
        schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        return message

    def backward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        run = self._start_once(mini_batch)
        inputs, output = run.activations.pop((micro_batch, chunk))
        run.left[chunk] -= 1
        if self._alone and not run.left[chunk]:
            run.unsynchronised[chunk].close()
        with self.role.groups.active():
            gradient = schedules.backward_step(
                inputs, output, received, get_model_type(self._chunks[chunk]), self.role.config
            )
        return None if inputs is None else cast("Tensor", gradient).contiguous()

    def reduce(self, mini_batch: int) -> None:
        """Start to reduce the gradient in the background if ``overlap_grad_reduce`` is set."""
        run = self._start_once(mini_batch)
        for chunk in run.unsynchronised:
            chunk.close()
        if self._chunks[0].ddp_config.overlap_grad_reduce and not self._alone:
            with self.role.groups.active():
                for chunk in self._chunks:
                    chunk.start_grad_sync()

    def norm(self, mini_batch: int) -> None:
        """Complete the gradient as Megatron does; start to sum its norm and the statistics."""
        run = self._complete(mini_batch)
        with self.role.groups.active():
            norm = self._optimizer.start_norm()
        self._pending = norm, self._start_statistics(run)

    def statistics(self) -> dict[str, float]:
        """Complete the gradient of the only mini-batch; its summed statistics. Collective."""
        return self._start_statistics(self._complete(0)).wait()

    def _complete(self, mini_batch: int) -> _RunningMiniBatch:
        run, self._running = self._start_once(mini_batch), None
        with self.role.groups.active():
            finalize_gradients(self._chunks, None)
        return run

    def _start_statistics(self, run: _RunningMiniBatch) -> PendingStatistics:
        return self.role.start_statistics(run.parts, run.statistics, self._wants_to_stop())

    def wait(self) -> tuple[float, dict[str, float], bool]:
        """Wait for the sums that ``norm`` started, and set the role's ``loss``. Returns the
        gradient norm, the summed statistics, and whether any rank wants to end the update early."""
        assert self._pending is not None, "call norm before wait"
        norm, statistics = self._pending
        self._pending = None
        sums = statistics.wait()
        return norm.wait(), sums, statistics.stop

    def finish(self) -> None:
        self._optimizer.wait_for_weights()

    def _start_once(self, number: int) -> _RunningMiniBatch:
        if self._running is None:
            self._running = self._start(number)
        assert self._running.number == number
        return self._running

    def _cut_next(self) -> list[MicroBatch]:
        if self._next is None:
            with self.role.groups.active():
                self._next = self.role.cut(self._mini_batches[0].batch, self._mini_batches[0].plan)
        return self._next

    def _start(self, number: int) -> _RunningMiniBatch:
        microbatches, self._next = self._cut_next(), None
        role, mini_batch = self.role, self._mini_batches.popleft()
        self._optimizer.wait_for_weights()
        with role.groups.active():
            for stage in role.stages:
                stage.train()
            self._optimizer.zero_grad()
            if role.routing:
                role.routing.before_update(mini_batch.batch, mini_batch.plan, microbatches)
        head = partial(role.head, batch=mini_batch.batch, inputs=mini_batch.inputs)
        objective = mini_batch.objective
        forward_step = forward_step_function(head, objective)
        unsynchronised = [ExitStack() for _ in self._chunks]
        for chunk, stack in zip(self._chunks, unsynchronised, strict=True):
            stack.enter_context(chunk.no_sync())
        left = [len(microbatches)] * len(self._chunks)
        return _RunningMiniBatch(
            number, microbatches, forward_step, objective.statistics, unsynchronised, left
        )


def forward_backward(role: Role, mini_batch: MiniBatch) -> dict[str, float]:
    """Compute the gradient of one mini-batch, set the role's ``loss``, and return the summed
    statistics. Collective."""
    batch, plan = mini_batch.batch, mini_batch.plan
    if role.routing and role.routing.needs_record(batch, plan):
        record_choices(role, batch, plan)
    work, links = StreamedRole(role, deque([mini_batch]), alone=True), Links([role.groups])
    passes = RoleWork(role.name, (len(plan[0]),), chunks=role.layout.vpp)
    schedule, _ = checked_schedule("sequential", (passes,), role.layout.pp)
    actions = schedule.lists[links.stage]
    passes_only = [action for action in actions if action.kind not in ("norm", "step")]
    carry_out(passes_only, {role.name: work}, links)
    return work.statistics()
