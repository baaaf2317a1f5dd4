"""Forward-only passes of a role by the executor, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.models.heads.outputs import HeadOutputs, num_outputs, unstack_outputs
from mppo.models.microbatch import MicroBatch
from mppo.models.mini_batch import TOKENS_ONLY, PassInputs
from mppo.models.role import Role
from mppo.models.stage import forward_step_function
from mppo.models.work_share import PassMoves, output_rows, return_home, sum_states
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Links
from mppo.pipeline.microbatches import MicroBatchPlan
from mppo.pipeline.schedule import forward_list


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
