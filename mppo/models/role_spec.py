"""The specification of a role, and the inputs of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.config.sections.megatron import MegatronConfig
from mppo.config.sections.optimizer import OptimConfig
from mppo.config.sections.roles import BatchingConfig, CriticConfig, ValueHeadInit
from mppo.models.heads.outputs import Head, HeadOutputs
from mppo.models.microbatch import MicroBatch
from mppo.models.moe.routing import Replay
from mppo.pipeline.microbatches import MicroBatchPlan


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
class RoleSpec:
    """How to build a role.

    Args:
        name: "actor", "critic", "ref" or "reward".
        head: the kind of output head.
        folder: the initial weights: a Hugging Face folder or a Megatron checkpoint.
        dtype: dtype of the parameters.
        megatron: the role's ``megatron`` section of the recipe.
        batching: micro-batch limits and head chunk.
        temperature: log-probabilities are those of softmax(logits / temperature).
        optim: the role's ``optim`` section of the recipe; None for a frozen role.
        total_steps: number of PPO steps of the run.
        router_replay: expert choices that the update replays (``mppo.models.moe.routing``).
        ema_decay: decay of the moving average of the weights; None: no average.
        value_head_init: distribution of a value head that ``folder`` lacks.
        seed: seed of that value head.
    """

    name: str
    head: Head
    folder: Path
    dtype: torch.dtype
    megatron: MegatronConfig
    batching: BatchingConfig
    temperature: float = 1.0
    optim: OptimConfig | None = None
    total_steps: int = 1
    router_replay: Replay = "off"
    ema_decay: float | None = None
    value_head_init: ValueHeadInit = CriticConfig().value_head_init
    seed: int = 0


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a policy's pass over a batch, besides the tokens.

    Args:
        ref_hidden_T: hidden states of the reference model ``[T, hidden]`` on the tokens held, for
            the KL over the vocabulary; ``[T, 0]`` before the last pipeline stage.
        text_from: index of the first sequence of plain text, which is scored at temperature 1;
            None: the batch has none.
    """

    ref_hidden_T: Tensor | None = None
    text_from: int | None = None

    def is_text(self, microbatch: MicroBatch) -> bool:
        """Whether a micro-batch holds plain text; a micro-batch never mixes it with responses."""
        first = microbatch.indices[0] if microbatch.indices else -1
        return self.text_from is not None and first >= self.text_from


TOKENS_ONLY = PassInputs()
"""The inputs of a pass that reads only tokens."""


@dataclass(frozen=True)
class MiniBatch:
    """One mini-batch and its objective.

    Args:
        batch: holds at least the sequences that this rank works on; followed by the documents of
            the pretraining mix, if any.
        plan: the mini-batch's micro-batches for every data-parallel rank.
        objective: loss and statistics of a micro-batch; their sums are those of the mini-batch.
        inputs: inputs of the passes, besides the tokens.
    """

    batch: Sequences
    plan: MicroBatchPlan
    objective: Objective
    inputs: PassInputs = TOKENS_ONLY
