"""Scores of responses by the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.batch import Batch, Trajectory
from mppo.config.schema import Recipe
from mppo.models.heads.outputs import ValueOutputs
from mppo.models.role import Role
from mppo.rewards.division import ScoringError
from mppo.rewards.reward_model.scale import RewardModelScale
from mppo.rewards.reward_model.texts import RewardModelTexts
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import ModelScore
from mppo.supervision.phase import phase

SCORING = "computing scores with reward_model"
"""The phase of the reward model's pass."""


@dataclass(frozen=True)
class RewardModelScorer:
    """Scores responses in a forward pass of the reward model.

    Args:
        role: the reward model.
        texts: makes its tokens.
        scale: normalises its scores.
        clip: normalised scores are clipped to [-clip, clip]; None: not clipped.
    """

    role: Role
    texts: RewardModelTexts
    scale: RewardModelScale
    clip: float | None = None

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[ModelScore]:
        """Score responses. Collective.

        Args:
            trajectories: the same on every rank; at least one.

        Raises:
            ScoringError: on every rank: the responses have no tokens of the reward model, or its
                scores no deviation.
        """
        with phase(SCORING):
            raw_B = model_scores(self.role, self.texts.tokens(trajectories))
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
) -> Scorer:
    """The scorer with the recipe's reward model; unchanged if the recipe has none.

    The arguments are those of ``RewardModelScorer``; None without a reward model.
    """
    if texts is None or role is None or scale is None:
        return scorer
    section = recipe.reward_model
    model = RewardModelScorer(role, texts, scale, section.clip)
    return replace(scorer, model=model, model_weight=section.weight)


def model_scores(role: Role, sequences: Sequence[Tensor]) -> Tensor:
    """The score of each text: the output of the score head for its last token. Collective.

    Args:
        role: a frozen role with a value head.
        sequences: tokens of each text, int64; the same on every rank.

    Returns:
        float32 ``[B]`` on the CPU of every rank.
    """
    batch = scoring_batch(sequences)
    outputs = role.forward(batch, role.plan(batch, training=False))
    assert isinstance(outputs, ValueOutputs)
    return outputs.values_T[batch.cu_seqlens[1:] - 1]


def scoring_batch(sequences: Sequence[Tensor]) -> Batch:
    """A batch of texts without responses, whose only values are those after the last tokens.

    The value at index t is that of the state before token t. Each sequence therefore has an end
    slot (``Batch.end_mask_T``), whose value is the output for the last token of the text; the slot
    repeats that token, and nothing reads it.

    Args:
        sequences: tokens of each text, int64.
    """
    tokens_T = torch.cat([part for ids in sequences for part in (ids, ids[-1:])])
    lengths = torch.tensor([len(ids) + 1 for ids in sequences])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    zeros_T = torch.zeros(len(tokens_T))
    end_mask_T = zeros_T.clone()
    end_mask_T[cu_seqlens[1:] - 1] = 1.0
    count = len(sequences)
    return Batch(
        tokens_T=tokens_T,
        cu_seqlens=cu_seqlens,
        response_mask_T=zeros_T,
        rollout_logprobs_T=zeros_T,
        group_B=torch.arange(count),
        scores_B=torch.zeros(count),
        truncated_B=torch.zeros(count, dtype=torch.bool),
        weight_version_T=torch.full_like(tokens_T, -1),
        end_mask_T=end_mask_T,
    )
