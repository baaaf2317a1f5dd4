"""What a role is built from, what its passes are given, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mppo.batch import Batch
from mppo.config.sections.megatron import MegatronConfig
from mppo.config.sections.optimizer import OptimConfig
from mppo.config.sections.roles import BatchingConfig
from mppo.models.heads.outputs import Head, Outputs
from mppo.models.microbatch import MicroBatch
from mppo.models.moe.routing import Replay
from mppo.pipeline.microbatches import MicroBatchPlan

Objective = Callable[[Outputs, tuple[int, ...]], tuple[Tensor, dict[str, Tensor]]]
"""From outputs and the micro-batch's sequence indices to (summed loss, summed statistics)."""


@dataclass(frozen=True)
class RoleSpec:
    """How to build a role.

    Args:
        name: "actor", "critic", "ref" or "reward".
        head: what the model ends in.
        folder: the initial weights: a Hugging Face folder, or a Megatron checkpoint.
        dtype: parameters' dtype.
        megatron: layout and recomputation.
        batching: micro-batch limits and head chunk.
        temperature: log-probabilities are of softmax(logits / temperature).
        optim: None for a frozen role.
        total_steps: PPO steps of the run.
        router_replay: whose choice of experts the update takes (``mppo.models.moe.routing``).
        ema_decay: of the moving average of the weights; None keeps none.
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


@dataclass(frozen=True)
class PassInputs:
    """What a policy's pass over a batch reads besides tokens.

    Args:
        ref_hidden_T: the reference's hidden states, for the KL over the vocabulary.
        text_from: sequences from this one on are plain text, read at temperature 1.
    """

    ref_hidden_T: Tensor | None = None
    text_from: int | None = None

    def is_text(self, microbatch: MicroBatch) -> bool:
        """Whether a micro-batch holds plain text (it never holds both)."""
        first = microbatch.indices[0] if microbatch.indices else -1
        return self.text_from is not None and first >= self.text_from


TOKENS_ONLY = PassInputs()
"""A pass that reads tokens alone."""


@dataclass(frozen=True)
class MiniBatch:
    """What a gradient is taken of.

    Args:
        batch: the global batch, and documents behind it where there are some.
        plan: the mini-batch's micro-batches for every data-parallel rank.
        objective: loss and statistics of a micro-batch; both add up over the mini-batch.
        inputs: what the passes read besides tokens.
    """

    batch: Batch
    plan: MicroBatchPlan
    objective: Objective
    inputs: PassInputs = TOKENS_ONLY
