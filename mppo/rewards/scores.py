"""Scores of responses, read and checked from what a reward function returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mppo.batch.score import ResponseScore, compact
from mppo.recipe.sections.reward import OnError
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.result import place_rewards, read_result
from mppo.safety.input_error import InputError


@dataclass(frozen=True)
class ModelScore:
    """The score of one response by the reward model: raw, and normalised and clipped."""

    raw: float
    score: float


@dataclass(frozen=True)
class FailedScore:
    """Replaces the result for a response on which the reward function failed. The message names the
    response and what went wrong; ``unscored`` as of ``ResponseScore``."""

    message: str
    unscored: str | None = None


UNSCORED = {
    "timeouts": "took longer than reward.timeout_s",
    "failures": "made the verifier fail, exceeded reward.memory_mb, or ended the process",
    "bad_verdicts": "wrote something else to the pipe for the results of the tests",
}
"""Reasons why a response has no score, and what the response did; metrics are named after the
keys."""


@dataclass(frozen=True)
class Unscored:
    """Replaces the result for a response that prevented its verifier from scoring: it scores 0, for
    a ``reason`` of ``UNSCORED``. ``reward.on_error`` does not apply: the answer is at fault, and a
    policy must neither end its run nor earn another score by it."""

    reason: str


_INSTEAD = "a number as reward.on_error is the score of such responses, and the run goes on"


def read_scores(
    results: Sequence[Any], responses: Sequence[Response], on_error: OnError = "stop"
) -> list[ResponseScore]:
    """Check what a reward function returned: for each response a value that ``read_result`` reads,
    a ``FailedScore`` or an ``Unscored``. If their number is wrong, no response has a score.
    InputError if one has none, and ``on_error`` is ``stop``."""
    if len(results) != len(responses):
        why = f"is missing: {len(results)} results came for {len(responses)} responses"
        results = [FailedScore(no_score(why, response)) for response in responses]
    return [_read(result, each, on_error) for result, each in zip(results, responses)]


def _read(result: Any, response: Response, on_error: OnError) -> ResponseScore:
    if isinstance(result, Unscored):
        return ResponseScore(0.0, unscored=result.reason)
    if not isinstance(result, FailedScore):
        try:
            found = read_result(result)
            placed = place_rewards(found.token_rewards, len(response.token_ids))
            rewards = compact(np.array(placed, np.float64))
            total, numbers = sum(rewards), found.numbers
            return ResponseScore(
                found.score + total,
                numbers,
                token_total=total,
                token_rewards=rewards,
                answer=found.answer,
                right=numbers["acc"] >= 1.0 if "acc" in numbers else None,
            )
        except ValueError as why:
            result = FailedScore(no_score(str(why), response))
    return without_score(result, on_error)


def without_score(failed: FailedScore, on_error: OnError) -> ResponseScore:
    """The score of a response that has none: the one place where ``reward.on_error`` decides. If
    that is ``stop``, it raises an InputError that says what to set."""
    if on_error == "stop":
        raise InputError(f"{failed.message} ({_INSTEAD})")
    return ResponseScore(float(on_error), error=failed.message, unscored=failed.unscored)


def no_score(why: str, response: Response) -> str:
    """Build the message about a result that holds no score; ``why`` is that of ``read_result``."""
    shown = shorten(response.text)
    return f"the score of {describe(response.prompt)} {why}; the response was {shown!r}"
