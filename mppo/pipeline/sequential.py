"""Carries a list of micro-batches through one role's pipeline by Megatron's own schedules.

What other schedules compute is compared with what these do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mppo.supervision.phase import tick


class HasIndices(Protocol):
    """A micro-batch, as an objective sees it."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The sequences of its batch that it holds."""
        ...


M = TypeVar("M", bound=HasIndices)


def run_pipeline(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[M],
    forward: Callable[[torch.nn.Module, M], Tensor],
    finish: Callable[[Tensor, M], Any],
    max_tokens: int,
    objective: Callable[[Any, tuple[int, ...]], tuple[Tensor, Any]] | None = None,
) -> list[Any]:
    """Run all micro-batches forward, and backward where there is an objective.

    The layout's groups must be active, and every rank of a pipeline passes equally many
    micro-batches, cut from the same sequences.

    Args:
        chunks: this rank's model chunks, wrapped in DDP where gradients are wanted.
        microbatches: inputs in order; each has the ``indices`` of its sequences.
        forward: runs one chunk.
        finish: called on the last stage with the last chunk's output: the micro-batch's outputs.
        max_tokens: largest token count of a micro-batch (a buffer size hint; lengths may differ).
        objective: loss and statistics of outputs and their sequences. The gradients of the losses
            are summed as they are. None: forward only.

    Returns:
        On the last stage, in micro-batch order: the outputs, or ``(loss, statistics)`` where there
        is an objective. Elsewhere an empty list.
    """

    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    with torch.set_grad_enabled(objective is not None):
        return get_forward_backward_func()(
            forward_step_func=forward_step_function(forward, finish, objective),
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else list(chunks),
            num_microbatches=len(microbatches),
            seq_length=max_tokens,
            micro_batch_size=1,
            forward_only=objective is None,
            collect_non_loss_data=objective is None,
        )


def forward_step_function(
    forward: Callable[[torch.nn.Module, M], Tensor],
    finish: Callable[[Tensor, M], Any],
    objective: Callable[[Any, tuple[int, ...]], tuple[Tensor, Any]] | None,
) -> Callable[[Iterator[M], torch.nn.Module], tuple[Tensor, Callable]]:
    """What Megatron calls for a micro-batch's forward pass; arguments as of ``run_pipeline``."""

    def forward_step(iterator: Iterator[M], chunk: torch.nn.Module):
        microbatch = next(iterator)
        tick()
        output = forward(chunk, microbatch)

        def loss_func(hidden: Tensor, non_loss_data: bool = False):
            outputs = finish(hidden, microbatch)
            if objective is None:
                return outputs
            loss, stats = objective(outputs, microbatch.indices)
            # three values and calculate_per_token_loss: Megatron leaves the loss as it is
            return loss, torch.ones((), dtype=torch.int), (loss.detach(), stats)

        return output, loss_func

    return forward_step
