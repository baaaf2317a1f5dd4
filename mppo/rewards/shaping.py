"""Formulas that turn a raw score into the reward."""

from __future__ import annotations


def clip_score(score: float, limit: float) -> float:
    """``min(max(score, -limit), limit)`` (DeepSpeed-Chat's reward clipping)."""
    return min(max(score, -limit), limit)


def overlong_penalty(response_length: int, max_length: int, buffer: int, factor: float) -> float:
    """Penalise a response that reaches into the last ``buffer`` tokens before the length limit.

    0 up to ``max_length - buffer`` tokens, then linear down to ``-factor`` at ``max_length``
    (Soft Overlong Punishment, DAPO, https://arxiv.org/abs/2503.14476, eq. 13).
    """
    excess = response_length - (max_length - buffer)
    return -factor * min(max(excess / buffer, 0.0), 1.0)
