"""What judges say of responses: read from what they return, with what could not be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mppo.config.sections.reward import OnError
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.result import read_result


@dataclass(frozen=True)
class Judgement:
    """The score of one response, and what came with it.

    Args:
        score: the outcome reward.
        numbers: further numbers by name, as ``acc`` and ``format``; they are logged.
        error: why the response could not be judged, where its score is 0 for that reason.
        unscored: the response has no score of its own for this reason, a key of ``UNSCORED``.
    """

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    unscored: str | None = None


@dataclass(frozen=True)
class JudgingError:
    """Stands in place of a result where a judge failed on one response.

    Args:
        message: names the response and what went wrong.
    """

    message: str


UNSCORED = {
    "timeouts": "took longer than reward.timeout_s",
    "failures": "made the verifier fail, need more than reward.memory_mb, or ended its process",
    "bad_verdicts": "wrote something else where the verdict on a program belongs",
}
"""Reasons for which a response scores 0, and what it did."""


@dataclass(frozen=True)
class Unscored:
    """Stands in place of a result where the response is to blame that there is none: it scores 0.

    Args:
        reason: a key of ``UNSCORED``.
    """

    reason: str


def read_judgements(
    results: Sequence[Any], responses: Sequence[Response], on_error: OnError = "raise"
) -> list[Judgement]:
    """What a judge returned, checked.

    Args:
        results: for each response a number, or a mapping with ``score`` and further numbers; a
            ``JudgingError`` or ``Unscored`` where there is none.
        responses: what was judged.
        on_error: ``zero`` scores a response that could not be judged 0.

    Raises:
        ValueError: too few or too many results, or, unless ``on_error`` is ``zero``, one that could
            not be judged.
    """
    if len(results) != len(responses):
        raise ValueError(f"{len(responses)} responses were judged, {len(results)} scores came back")
    return [_read(result, each, on_error) for result, each in zip(results, responses)]


def _read(result: Any, response: Response, on_error: OnError) -> Judgement:
    if isinstance(result, Unscored):
        return Judgement(0.0, unscored=result.reason)
    if isinstance(result, JudgingError):
        error = result.message
    else:
        try:
            return Judgement(*read_result(result))
        except ValueError as why:
            error = no_score(str(why), response)
    if on_error == "raise":
        raise ValueError(error)
    return Judgement(0.0, error=error)


def no_score(why: str, response: Response) -> str:
    """The message where a response's result holds no score.

    Args:
        why: as ``read_result`` says it.
        response: what was judged.
    """
    shown = shorten(response.text)
    return f"the score of {describe(response.prompt)} {why}; the response was {shown!r}"
