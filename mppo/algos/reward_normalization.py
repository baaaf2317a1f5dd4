"""Outcome scores brought to a common scale: by batch, by group, by a running or a given mean.

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

_EPS = 1e-8


@dataclass(frozen=True)
class ScoreScale:
    """``(x - mean) / divisor``: one scale for scores and for what is compared with them.

    Args:
        mean, divisor: numbers, or float64 ``[B]``, one for each response.
    """

    mean: float | Tensor
    divisor: float | Tensor

    def __call__(self, x_B: Tensor) -> Tensor:
        """The numbers on this scale: float32 ``[B]``."""
        return ((x_B.double() - self.mean) / self.divisor).float()


def batch_scale(scores_B: Tensor) -> ScoreScale:
    """Mean, and unbiased standard deviation + 1e-8, of the batch.

    Equal scores, or a single one, have no deviation: nothing is divided, and they become 0. (The
    sum of equal float32 numbers is exact in float64, so their deviation is exactly 0.)
    """
    scores_B = scores_B.double()
    if len(scores_B) < 2:
        return ScoreScale(scores_B, 1.0)
    std = scores_B.std().item()
    return ScoreScale(scores_B.mean().item(), std + _EPS if std > 0 else 1.0)


def group_scale(scores_B: Tensor, group_B: Tensor) -> ScoreScale:
    """The same for each prompt's responses; a group of one keeps its score."""
    scores_B = scores_B.double()
    std_B = group_std(scores_B, group_B)
    return ScoreScale(group_mean(scores_B, group_B), torch.where(std_B > 0, std_B + _EPS, 1.0))


class RewardStats:
    """Mean and variance of every score seen so far.

    ``merge`` of a batch of n scores of mean m and squared deviation S into N, M, Q:
    ``Q += S + (m - M)^2 N n / (N + n)``, ``M += (m - M) n / (N + n)``, ``N += n``.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 before two scores were seen."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0

    def merge(self, scores_B: Tensor) -> None:
        """Take a batch of scores in."""
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
        """Mean, and standard deviation + 1e-8, of what was seen so far; equal scores: as above."""
        return ScoreScale(self.mean, self.std + _EPS if self.std > 0 else 1.0)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.count = int(state["count"])
        self.mean, self.squares = float(state["mean"]), float(state["squares"])
