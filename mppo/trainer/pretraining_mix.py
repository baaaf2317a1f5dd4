"""Pretraining text beside a mini-batch: the language-model loss of PPO-ptx in the actor's pass.

The documents are additional micro-batches of the same pipeline pass. Their gradient therefore adds
to the policy's gradient before the one optimizer step, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.policy_loss import ptx_loss
from mppo.algos.token_axis import select_sequences
from mppo.batch.batch import Batch, Sequences
from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.head_outputs import HeadOutputs, PolicyOutputs, map_outputs
from mppo.batch.microbatches import MicroBatchPlan, MicroBatchSpec
from mppo.batch.mini_batch import Objective
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.selection import concatenate_batches
from mppo.data.loader import PromptLoader
from mppo.parallel.device import copied

METRIC = "actor/ptx_loss"


@dataclass(frozen=True)
class Documents:
    """The documents of one mini-batch, and their micro-batches for every data-parallel rank."""

    batch: Batch
    plan: MicroBatchPlan


class PretrainingMix:
    """An endless stream of documents, whose position is the state, and their loss, which has weight
    ``coef`` relative to the policy's."""

    def __init__(self, documents: PromptLoader, coef: float) -> None:
        self.documents = documents
        self.coef = coef

    def draw(self, spec: MicroBatchSpec) -> Documents:
        """The next documents, cut as the actor's sequences are."""
        batch = text_batch(next(self.documents))
        return Documents(batch, spec.plan(batch.lengths_B.tolist()))

    def join(
        self, batch: Sequences, plan: MicroBatchPlan, documents: Documents, objective: Objective
    ) -> tuple[Sequences, MicroBatchPlan, Objective]:
        """Put documents behind a batch's sequences. Returns the longer batch; the plan with the
        documents' micro-batches after each rank's own; the objective of both kinds,
        ``L + coef mean(-log pi(text))``, with the metric ``actor/ptx_loss`` (nats per token,
        without the coefficient)."""
        text, first = documents.batch, batch.num_sequences
        longer = [
            [*mine, *([first + i for i in indices] for indices in theirs)]
            for mine, theirs in zip(plan, documents.plan, strict=True)
        ]
        mixed = MixedObjective(objective, text, first, self.coef)
        return concatenate_batches([batch, text]), longer, mixed


@dataclass(frozen=True)
class MixedObjective:
    """``L + coef mean(-log pi(text))`` over micro-batches that hold either kind of sequence;
    documents begin at the index ``first``."""

    objective: Objective
    text: Batch
    first: int
    coef: float

    @property
    def statistics(self) -> tuple[str, ...]:
        return (*self.objective.statistics, METRIC)

    def __call__(
        self, outputs: HeadOutputs, indices: tuple[int, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, PolicyOutputs)
        if not indices or indices[0] < self.first:
            loss, stats = self.objective(outputs, indices)
            return loss, {**stats, METRIC: 0.0 * loss.detach()}
        # all micro-batches must report the same statistics: take the policy's of no sequence
        nothing, stats = self.objective(map_outputs(outputs, lambda x_T: x_T[:0]), ())
        text, chosen = self.text, [index - self.first for index in indices]
        (mask_T,) = copied([select_sequences(text.response_mask_T, text.cu_seqlens, chosen)])
        num_tokens = float(text.response_mask_T.sum())
        loss = ptx_loss(outputs.logprobs_T, mask_T, num_tokens)
        return nothing + self.coef * loss, {**stats, METRIC: loss.detach()}


def text_batch(documents: Sequence[Prompt]) -> Batch:
    """Pack documents as sequences of which every token but the first is predicted."""
    episodes = [
        Episode.sampled(
            Prompt(document.uid, document.token_ids[:1], document.data_source, "", ""),
            EpisodeTokens(document.token_ids[1:], torch.zeros(len(document.token_ids) - 1)),
            "stop",
            0,
        )
        for document in documents
    ]
    return pack_episodes(episodes)
