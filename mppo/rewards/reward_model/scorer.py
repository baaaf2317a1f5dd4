"""Scores of responses by the reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.algos.packing import cumulative
from mppo.batch.batch import Sequences
from mppo.batch.episode import Episode
from mppo.config.schema import Recipe
from mppo.models.heads.outputs import ValueOutputs
from mppo.models.role import Role
from mppo.models.streamed_role import forward
from mppo.parallel.exchange import sum_over_ranks
from mppo.rewards.division import ScoringError
from mppo.rewards.reward_model.scale import RewardModelScale
from mppo.rewards.reward_model.texts import RewardModelTexts
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import ModelScore
from mppo.supervision.phase import phase

SCORING = "computing scores with reward_model"


@dataclass(frozen=True)
class RewardModelScorer:
    """Scores responses in a forward pass of the reward model.

    Normalised scores are clipped to [-clip, clip]; in the context of ``placed`` the parameters are
    on the device.
    """

    role: Role
    texts: RewardModelTexts
    scale: RewardModelScale
    clip: float | None = None
    placed: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, episodes: Sequence[Episode]) -> list[ModelScore]:
        """Score responses. Collective; ScoringError on every rank if the responses have no tokens
        of the reward model, or its scores no deviation."""
        with phase(SCORING):
            held, lengths = self.texts.tokens(episodes)
            homes = [each.home for each in episodes]
            with self.placed():
                raw_B = model_scores(self.role, scoring_batch(held, lengths, homes))
            try:
                scores_B = self.scale(raw_B)
            except ValueError as error:
                raise ScoringError(str(error)) from error
        if self.clip is not None:
            scores_B = scores_B.clamp(-self.clip, self.clip)
        return list(map(ModelScore, raw_B.tolist(), scores_B.tolist()))


def with_reward_model(
    scorer: Scorer,
    recipe: Recipe,
    texts: RewardModelTexts | None,
    role: Role | None,
    scale: RewardModelScale | None,
    placed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Scorer:
    """The scorer with the recipe's reward model, if it has one; for the other arguments see
    ``RewardModelScorer``."""
    if texts is None or role is None or scale is None:
        return scorer
    section = recipe.reward_model
    model = RewardModelScorer(role, texts, scale, section.clip, placed)
    return replace(scorer, model=model, model_weight=section.weight)


def model_scores(role: Role, batch: Sequences) -> Tensor:
    """The score of each text of a ``scoring_batch``, float32 ``[B]`` on the CPU of every rank: the
    output of the score head for its last token. Collective."""
    plan = role.plan(batch, training=False)
    share, inputs = role.fetch(batch, plan)
    outputs = forward(role, share, plan, inputs)
    assert isinstance(outputs, ValueOutputs)
    scores_H = outputs.values_T[batch.cu_seqlens[1:] - 1]
    if batch.is_replicated:
        return scores_H
    # each score has one home, so the sum over ranks is exact
    scores_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    scores_B[batch.held_H] = scores_H.double()
    return sum_over_ranks(scores_B).float()


def scoring_batch(
    held: Mapping[int, Tensor], lengths: Sequence[int], homes: Sequence[int]
) -> Sequences:
    """A batch of texts without responses, whose only values are those after the last tokens.

    The value at index t is that of the state before token t. Each sequence therefore has an end
    slot (``Batch.end_mask_T``), whose value is the output for the last token of the text; the slot
    repeats that token, and nothing reads it.

    Args:
        held: tokens of the texts on this rank, int64, by index, ascending.
        lengths, homes: of each text on all ranks: its tokens, and its rank (-1: every rank).
    """
    nothing = torch.empty(0, dtype=torch.int64)
    tokens_T = torch.cat([nothing, *(part for ids in held.values() for part in (ids, ids[-1:]))])
    lengths_B, held_H = torch.tensor(lengths) + 1, torch.tensor(list(held), dtype=torch.int64)
    cu_seqlens = cumulative(lengths_B[held_H])
    zeros_T = torch.zeros(len(tokens_T))
    end_mask_T = zeros_T.clone()
    end_mask_T[cu_seqlens[1:] - 1] = 1.0
    return Sequences(
        tokens_T=tokens_T,
        cu_seqlens=cu_seqlens,
        response_mask_T=zeros_T,
        end_mask_T=end_mask_T,
        held_H=held_H,
        lengths_B=lengths_B,
        response_B=torch.zeros_like(lengths_B),
        end_B=torch.ones_like(lengths_B),
        home_B=torch.tensor(homes, dtype=torch.int32),
    )
