"""Forward-only passes of a role for the executor, one micro-batch at a time."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.models.heads.outputs import HeadOutputs
from mppo.models.role import Role
from mppo.models.role_spec import TOKENS_ONLY
from mppo.models.stage import run_chunk
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.sequential import forward_step_function


class StreamedForward:
    """A role's forward pass over a batch; implements ``ForwardWork`` of the executor.

    In the lists, all micro-batches belong to mini-batch 0.

    Args:
        role: the role.
        batch: sequences at home. The constructor is collective.
    """

    def __init__(self, role: Role, batch: Sequences) -> None:
        self.role = role
        self._plan = role.plan(batch, training=False)
        self._batch, _ = role.fetch(batch, self._plan)
        self._microbatches = role.begin_forward(self._batch, self._plan)
        head = partial(role.head, batch=self._batch, inputs=TOKENS_ONLY)
        self._forward_step = forward_step_function(run_chunk, head, None)
        self._parts: list[HeadOutputs] = []

    @property
    def work(self) -> RoleWork:
        """The passes of the role, for the lists."""
        return RoleWork(self.role.name, (len(self._microbatches),), chunks=self.role.layout.vpp)

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> Tensor:
        """See ``ForwardWork``."""
        return self.role.message_buffer(self._microbatches[micro_batch])

    def forward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """See ``ForwardWork``."""
        is_last = self.role.is_last_chunk(chunk)
        with self.role.groups.active(), torch.no_grad():
            output, _ = schedules.forward_step(
                self._forward_step,
                iter([self._microbatches[micro_batch]]),
                self.role.stages[chunk],
                len(self._microbatches),
                received,
                self._parts,
                self.role.config,
                self.role.layout.cp,
                collect_non_loss_data=True,
                current_microbatch=micro_batch,
                vp_stage=self.role.stages[chunk].vp_stage,
                is_last_stage=is_last,
            )
        assert isinstance(output, Tensor)
        return None if is_last else output

    def outputs(self) -> HeadOutputs:
        """The head's outputs in the form of ``Role.forward``. Collective."""
        self.role.end_forward(self._batch, self._plan, self._microbatches)
        return self.role.return_outputs(
            self._batch, self._plan, self._microbatches, self._parts, TOKENS_ONLY
        )
