"""The score of a response."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class ResponseScore:
    """The score of one response and the further numbers of the reward function.

    Args:
        score: the outcome reward plus ``token_total``, which adds up the tokens' rewards.
        numbers: further numbers by name, such as ``acc`` and ``format``; they are logged.
        error: why there is no score, if ``score`` is the number of ``reward.on_error``.
        unscored: the limit that the response exceeded, or what it did to its verifier: a key of
            ``rewards.scores.UNSCORED``. Without ``error``, it scores 0 for that reason.
        token_rewards: one for each token, on the rank that holds the response; empty: all 0.
        answer: the final answer in the response; empty if it has none, None if nothing reads it.
        right: whether the response is right, before any shaping of the score; None if unknown.
    """

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    unscored: str | None = None
    token_total: float = 0.0
    token_rewards: Sequence[float] = ()
    answer: str | None = None
    right: bool | None = None

    def scaled(self, factor: float) -> ResponseScore:
        rewards = compact(factor * np.asarray(self.token_rewards, np.float64))
        total, score = factor * self.token_total, factor * self.score
        return replace(self, score=score, token_total=total, token_rewards=rewards)

    def with_outcome(self, outcome: float) -> ResponseScore:
        """Replace the outcome reward; the token rewards stay."""
        return replace(self, score=outcome + self.token_total)

    @property
    def outcome(self) -> float:
        return self.score - self.token_total


def compact(rewards: np.ndarray) -> Sequence[float]:
    """float64 rewards as a sequence of Python numbers, in 8 bytes each."""
    return array("d", rewards.tobytes()) or ()
