"""Scores of responses, read and checked from what a reward function returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mppo.config.sections.reward import OnError
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.result import read_result


@dataclass(frozen=True)
class ResponseScore:
    """The score of one response and the further numbers of the reward function.

    Args:
        score: the outcome reward.
        numbers: further numbers by name, such as ``acc`` and ``format``; they are logged.
        error: why the reward function failed, if ``score`` is 0 for that reason.
        unscored: why the response scores 0 without a score of the reward function: a key of
            ``UNSCORED``.
        answer: the final answer in the response; empty if it has none, None if nothing reads it.
        right: whether the response is right, before any shaping of the score; None if the reward
            does not say so.
    """

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    unscored: str | None = None
    answer: str | None = None
    right: bool | None = None


@dataclass(frozen=True)
class ModelScore:
    """The score of one response by the reward model.

    Args:
        raw: the model's output.
        score: the output, normalised and clipped.
    """

    raw: float
    score: float


@dataclass(frozen=True)
class FailedScore:
    """Replaces the result for a response on which the reward function failed.

    Args:
        message: names the response and what went wrong.
    """

    message: str


UNSCORED = {
    "timeouts": "took longer than reward.timeout_s",
    "failures": "made the verifier fail, exceeded reward.memory_mb, or ended the process",
    "bad_verdicts": "wrote something else to the pipe for the results of the tests",
}
"""Reasons why a response scores 0, and what the response did; metrics are named after the keys."""


@dataclass(frozen=True)
class Unscored:
    """Replaces the result for a response that prevented its own scoring: it scores 0.

    Args:
        reason: a key of ``UNSCORED``.
    """

    reason: str


def read_scores(
    results: Sequence[Any], responses: Sequence[Response], on_error: OnError = "raise"
) -> list[ResponseScore]:
    """Check what a reward function returned.

    Args:
        results: for each response a number, a mapping with ``score`` and further numbers, a
            ``FailedScore`` or an ``Unscored``.
        responses: the responses that were scored.
        on_error: ``zero`` gives score 0 to a response on which the reward function failed.

    Raises:
        ValueError: the number of results is wrong, or the reward function failed on a response
            and ``on_error`` is not ``zero``.
    """
    if len(results) != len(responses):
        raise ValueError(
            f"the reward function returned {len(results)} results for {len(responses)} responses; "
            "it must return one per response"
        )
    return [_read(result, each, on_error) for result, each in zip(results, responses)]


def _read(result: Any, response: Response, on_error: OnError) -> ResponseScore:
    if isinstance(result, Unscored):
        return ResponseScore(0.0, unscored=result.reason)
    if isinstance(result, FailedScore):
        error = result.message
    else:
        try:
            score, numbers, answer = read_result(result)
            right = numbers["acc"] >= 1.0 if "acc" in numbers else None
            return ResponseScore(score, numbers, answer=answer, right=right)
        except ValueError as why:
            error = no_score(str(why), response)
    if on_error == "raise":
        raise ValueError(error)
    return ResponseScore(0.0, error=error)


def no_score(why: str, response: Response) -> str:
    """Build the message about a result that holds no score.

    Args:
        why: the message of ``read_result``.
        response: the response that was scored.
    """
    shown = shorten(response.text)
    return f"the score of {describe(response.prompt)} {why}; the response was {shown!r}"
