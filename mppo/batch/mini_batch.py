"""The inputs of a role's passes, and a mini-batch with its objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.head_outputs import HeadOutputs
from mppo.batch.microbatches import MicroBatchPlan


class Objective(Protocol):
    """The loss of a mini-batch, computed micro-batch by micro-batch."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics; ranks that compute no loss need them to join their sums."""
        ...

    def __call__(
        self, outputs: HeadOutputs, indices: tuple[int, ...], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Map a micro-batch's outputs and sequence indices to summed loss and statistics."""
        ...


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a policy's pass over a batch, besides the tokens.

    Args:
        ref_hidden_T: hidden states of the reference model ``[T, hidden]`` on the tokens held, for
            the KL over the vocabulary; ``[T, 0]`` before the last pipeline stage.
        text_from: index of the first sequence of plain text, which is scored at temperature 1;
            None: the batch has none.
        with_squares: compute ``PolicyOutputs.squares_T``; in a pass without gradients only.
    """

    ref_hidden_T: Tensor | None = None
    text_from: int | None = None
    with_squares: bool = False

    def is_text(self, indices: tuple[int, ...]) -> bool:
        """Whether the sequences of a micro-batch are plain text: none mixes it with responses."""
        first = indices[0] if indices else -1
        return self.text_from is not None and first >= self.text_from


TOKENS_ONLY = PassInputs()
"""The inputs of a pass that reads only tokens."""


@dataclass(frozen=True)
class MiniBatch:
    """One mini-batch and its objective. ``batch`` holds at least the sequences that this rank works
    on, followed by the documents of the pretraining mix. ``plan`` has the micro-batches of every
    data-parallel rank; the sums of their losses and statistics are those of the mini-batch."""

    batch: Sequences
    plan: MicroBatchPlan
    objective: Objective
    inputs: PassInputs = TOKENS_ONLY
