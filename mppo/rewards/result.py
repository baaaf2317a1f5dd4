"""Reading of a reward function's result: a number, or a mapping with ``score`` and more.

Imports the standard library only, because the worker process that runs the function uses it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

SHOWN = 80
"""Most characters of a result that a message quotes."""
ANSWER = "pred"
"""Name of the answer that the function found in the response (verl's)."""
ANSWER_CHARACTERS = 256
"""Longer answers are cut, so that a vote never compares long texts."""


def read_result(result: Any) -> tuple[float, dict[str, float], str | None]:
    """Split a result into its score, further numbers by name, and its answer; drop other values.

    Returns:
        The answer is the text or number under ``pred``; None without one.

    Raises:
        ValueError: there is no score; the message continues a sentence that begins "the score".
    """
    if not isinstance(result, Mapping):
        return _score(result), {}, None
    if "score" not in result:
        keys = _shown(", ".join(map(repr, result)) or "nothing")
        raise ValueError(f"is missing: the dict that the function returned holds {keys}")
    numbers = {str(name): number(value) for name, value in result.items() if name != "score"}
    found = {name: value for name, value in numbers.items() if value is not None}
    return _score(result["score"]), found, _answer(result.get(ANSWER))


def _answer(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip()[:ANSWER_CHARACTERS]
    given = number(value)
    return None if given is None else f"{given:.15g}"


def _score(value: Any) -> float:
    score = number(value)
    if score is None or not math.isfinite(score):
        raise ValueError(f"is {_shown(repr(value))}, not a finite number")
    return score


def number(value: Any) -> float | None:
    """Convert a Python, NumPy or torch number, or an array of one element, else return None."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (RuntimeError, TypeError, ValueError):  # several elements
            return None
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:  # an integer of a thousand digits
        return None


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
