"""Normalisation of outcome scores: over a batch, a group, the run, or by given moments.

Source: OpenRLHF ``normalize_reward`` (mean and deviation of the reward model's training data, from
its config); ROLL ``RewardStats`` and ``reward_norm`` (batch, group, running); running variance
by Chan's parallel update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algos.group_baselines import group_mean, group_std
from mppo.algos.masked import EPS


@dataclass(frozen=True)
class ScoreScale:
    """``(x - mean) / divisor``, numbers or float64 ``[B]``, for scores and their baselines."""

    mean: float | Tensor
    divisor: float | Tensor

    def __call__(self, x_B: Tensor) -> Tensor:
        return ((x_B.double() - self.mean) / self.divisor).float()

    def at(self, index_B: Tensor) -> ScoreScale:
        """The scale of the responses at some places: int64 ``[B]``."""
        mean, divisor = (
            x[index_B] if isinstance(x, Tensor) and x.dim() else x
            for x in (self.mean, self.divisor)
        )
        return ScoreScale(mean, divisor)


def batch_scale(scores_B: Tensor) -> ScoreScale:
    """Mean, and unbiased standard deviation + 1e-8, of the batch. Equal scores have a deviation of
    0: they become 0 without a division. (The sum of equal float32 numbers is exact in float64, so
    their deviation is exactly 0.) A single score becomes 0 too."""
    scores_B = scores_B.double()
    if len(scores_B) < 2:
        return ScoreScale(scores_B, 1.0)
    std = scores_B.std().item()
    return ScoreScale(scores_B.mean().item(), std + EPS if std > 0 else 1.0)


def group_scale(scores_B: Tensor, group_B: Tensor) -> ScoreScale:
    """See ``batch_scale``, for each prompt's responses; a group of one keeps its score."""
    scores_B = scores_B.double()
    std_B = group_std(scores_B, group_B)
    return ScoreScale(group_mean(scores_B, group_B), torch.where(std_B > 0, std_B + EPS, 1.0))


class RewardStats:
    """Running mean and variance of all scores of the run.

    ``merge`` updates N, M, Q by a batch of n scores with mean m and squared deviation S:
    ``Q += S + (m - M)^2 N n / (N + n)``, ``M += (m - M) n / (N + n)``, ``N += n``.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 for fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0

    def merge(self, scores_B: Tensor) -> None:
        n = len(scores_B)
        if n == 0:
            return
        scores_B = scores_B.double()
        batch_mean = scores_B.mean().item()
        batch_squares = (scores_B - batch_mean).square().sum().item()
        shift, total = batch_mean - self.mean, self.count + n
        self.squares += batch_squares + shift**2 * self.count * n / total
        self.mean += shift * n / total
        self.count = total

    def scale(self) -> ScoreScale:
        """Mean, and standard deviation + 1e-8, of all scores; equal scores: see ``batch_scale``."""
        return ScoreScale(self.mean, self.std + EPS if self.std > 0 else 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = int(state["count"])
        self.mean, self.squares = float(state["mean"]), float(state["squares"])
