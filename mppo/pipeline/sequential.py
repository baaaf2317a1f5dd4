"""One role's micro-batches through its pipeline, by Megatron's own schedules.

Tests compare the results of all other schedules with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from mppo.pipeline.planned_shapes import PlannedShapes, Shape, active_groups
from mppo.supervision.phase import tick


class HasIndices(Protocol):
    """A micro-batch that has the indices of its sequences."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices in the batch of the micro-batch's sequences."""
        ...


M = TypeVar("M", bound=HasIndices)


def run_pipeline(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[M],
    forward: Callable[[torch.nn.Module, M], Tensor],
    finish: Callable[[Tensor, M], Any],
    shape_of: Callable[[M], Shape],
    objective: Callable[[Any, tuple[int, ...]], tuple[Tensor, Any]] | None = None,
) -> list[Any]:
    """Run all micro-batches forward, and also backward if there is an objective.

    The layout's groups must be active. All ranks of a pipeline must pass the same number of
    micro-batches, cut from the same sequences.

    Args:
        chunks: this rank's model chunks; wrapped in DDP if there is an objective.
        microbatches: the micro-batches in order.
        forward: computes the output of one chunk for a micro-batch.
        finish: computes the micro-batch's outputs from the output of the last chunk; called on the
            last stage only.
        shape_of: returns the shape of a micro-batch's hidden states between two stages.
        objective: maps the outputs of a micro-batch and its sequence indices to loss and
            statistics. The losses' gradients are summed without scaling. None: forward only.

    Returns:
        On the last stage, in micro-batch order: the outputs, or ``(loss, statistics)`` if there is
        an objective. On other stages an empty list.
    """
    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    groups, shapes = active_groups(), [shape_of(microbatch) for microbatch in microbatches]
    with torch.set_grad_enabled(objective is not None):
        return get_forward_backward_func()(
            forward_step_func=forward_step_function(forward, finish, objective),
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(microbatches),
            seq_length=max(tokens for tokens, *_ in shapes),  # only a hint: lengths may differ
            micro_batch_size=1,
            p2p_communicator=PlannedShapes(shapes, len(chunks), get_model_config(chunks[0])),
            pg_collection=groups,
            forward_only=objective is None,
            collect_non_loss_data=objective is None,
        )


def forward_step_function(
    forward: Callable[[torch.nn.Module, M], Tensor],
    finish: Callable[[Tensor, M], Any],
    objective: Callable[[Any, tuple[int, ...]], tuple[Tensor, Any]] | None,
) -> Callable[[Iterator[M], torch.nn.Module], tuple[Tensor, Callable]]:
    """Make Megatron's ``forward_step_func``; for the arguments see ``run_pipeline``."""

    def forward_step(iterator: Iterator[M], chunk: torch.nn.Module):
        microbatch = next(iterator)
        tick()
        output = forward(chunk, microbatch)

        def loss_func(hidden: Tensor, non_loss_data: bool = False):
            outputs = finish(hidden, microbatch)
            if objective is None:
                return outputs
            loss, stats = objective(outputs, microbatch.indices)
            # three values and calculate_per_token_loss: Megatron does not scale the loss
            return loss, torch.ones((), dtype=torch.int), (loss.detach(), stats)

        return output, loss_func

    return forward_step
