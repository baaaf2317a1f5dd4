"""Messages of Megatron's schedules whose shapes both ends know from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, ...]


class PlannedShapes(P2PCommunicator):
    """Megatron's communicator, without the messages that announce the shapes of other messages.

    Before every message of unknown length, Megatron sends its shape, and the receiver waits for the
    GPU to read it. Here the ranks of a pipeline have the same micro-batches, and a rank receives in
    a known order: inputs and gradients each in the order of the forward passes.

    Args:
        shapes: shape of a message of every micro-batch, in order.
        chunks: number of this rank's model chunks.
        config: Megatron's configuration of the model.
    """

    def __init__(self, shapes: Sequence[Shape], chunks: int, config: Any) -> None:
        pipeline = cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())
        super().__init__(pipeline, config)
        stage, stages = self.pp_group.rank(), self.pp_group.size()
        group = config.microbatch_group_size_per_vp_stage or stages
        self._inputs = _received(shapes, chunks, group, at_end=stage == 0)
        self._gradients = _received(shapes, chunks, group, at_end=stage == stages - 1)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """The shapes of an input and of a gradient that are received now; called by Megatron."""
        inputs = next(self._inputs) if recv_prev else ()
        return inputs, next(self._gradients) if recv_next else ()


def _received(shapes: Sequence[Shape], chunks: int, group: int, at_end: bool) -> Iterator[Shape]:
    """The shapes of the messages that a rank receives in one direction, in their order.

    Args:
        shapes: by micro-batch.
        chunks: number of the rank's model chunks.
        group: number of micro-batches that pass a chunk before the next chunk's turn.
        at_end: the neighbour's messages come around the pipeline's end, so that the chunk with
            which the model begins (or ends) receives none.
    """
    for micro_batch, chunk in get_schedule_table(len(shapes), chunks, group):
        if not (at_end and chunk == chunks - 1):
            yield shapes[micro_batch]


def active_groups() -> ProcessGroupCollection:
    """The process groups of the active layout, as Megatron's schedules collect them."""
    groups: Any = ProcessGroupCollection()  # its annotations allow no missing embedding group
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups
