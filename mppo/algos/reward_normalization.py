"""Outcome scores brought to a common scale: by batch, by group, by a running or a given mean.

Source: OpenRLHF ``normalize_reward`` (mean and deviation of the reward model's training data, from
its config); ROLL ``RunningMoments`` and ``reward_norm`` (batch, group, running); running variance
by Chan's parallel update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mppo.algos.group_baselines import group_mean, group_std


def normalize_given(scores_B: Tensor, mean: float, std: float) -> Tensor:
    """``(score - mean) / std`` with numbers known beforehand; ``std`` is positive."""
    return (scores_B - mean) / std


def normalize_by_batch(scores_B: Tensor, eps: float = 1e-8) -> Tensor:
    """``(score - mean) / (std + eps)`` over the batch, std unbiased; one score becomes 0."""
    if len(scores_B) < 2:
        return torch.zeros_like(scores_B)
    return (scores_B - scores_B.mean()) / (scores_B.std() + eps)


def normalize_by_group(scores_B: Tensor, group_B: Tensor, eps: float = 1e-8) -> Tensor:
    """``(score - mean) / (std + eps)`` over each prompt's samples; a group of one stays."""
    return (scores_B - group_mean(scores_B, group_B)) / (group_std(scores_B, group_B) + eps)


class RunningMoments:
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

    def normalize(self, scores_B: Tensor, eps: float = 1e-8) -> Tensor:
        """``(score - mean) / (std + eps)`` by what was seen so far."""
        return (scores_B - self.mean) / (self.std + eps)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.count = int(state["count"])
        self.mean, self.squares = float(state["mean"]), float(state["squares"])
