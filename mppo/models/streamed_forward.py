"""Forward-only passes of a role for the executor, one micro-batch at a time."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from mppo.batch import Batch
from mppo.models.heads.outputs import Outputs
from mppo.models.role import Role, run_chunk
from mppo.models.role_spec import TOKENS_ONLY
from mppo.pipeline.sequential import forward_step_function


class StreamedForward:
    """A role's forward pass over a batch; implements ``ForwardWork`` of the executor.

    The layout must not be interleaved. In the lists, all micro-batches belong to mini-batch 0.

    Args:
        role: the role.
        batch: the global batch.
    """

    def __init__(self, role: Role, batch: Batch) -> None:
        assert role.layout.vpp == 1
        self.role, self._batch = role, batch
        self._plan = role.plan(batch, training=False)
        self._microbatches = role.begin_forward(batch, self._plan)
        head = partial(role.head, batch=batch, inputs=TOKENS_ONLY)
        self._forward_step = forward_step_function(run_chunk, head, None)
        self._parts: list[Outputs] = []

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per data-parallel rank."""
        return len(self._microbatches)

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> Tensor:
        """See ``ForwardWork``."""
        return self.role.message_buffer(self._microbatches[micro_batch])

    def forward(self, mini_batch: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """See ``ForwardWork``."""
        with self.role.groups.active(), torch.no_grad():
            output, _ = schedules.forward_step(
                self._forward_step,
                iter([self._microbatches[micro_batch]]),
                self.role.stages[0],
                self.num_micro_batches,
                received,
                self._parts,
                self.role.config,
                self.role.layout.cp,
                collect_non_loss_data=True,
                current_microbatch=micro_batch,
                is_last_stage=self.role.groups.is_last_stage,
            )
        assert isinstance(output, Tensor)
        return None if self.role.groups.is_last_stage else output

    def outputs(self) -> Outputs:
        """Gather the head's outputs on every rank, in the form of ``Role.forward``. Collective."""
        self.role.end_forward(self._batch, self._plan, self._microbatches)
        return self.role.gather_outputs(self._batch, self._microbatches, self._parts, False)
