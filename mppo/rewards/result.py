"""Reading of a reward function's result for one response.

A result is a number; or one number for each token of the response, or (position, number) pairs; or
a mapping with ``score``, ``token_rewards`` or both, and further numbers and the answer (``pred``).

Imports the standard library and ``mppo.safety`` only, because the worker process that runs the
function uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from mppo.safety.foreign_text import valid_text
from mppo.safety.input_error import InputError

SHOWN = 80
"""Most characters of a result that a message quotes."""
ANSWER = "pred"
"""Name of the answer that the function found in the response (verl's)."""
ANSWER_CHARACTERS = 256
"""Longer answers are cut, so that a vote never compares long texts."""
LARGEST = 3.4e38
"""Scores and rewards become float32 numbers."""

TokenRewards = Sequence[Any]
"""One reward for each token of a response, or rewards at some positions."""


class NoScore(InputError):
    """There is no score; the message continues a sentence that begins "the score"."""


@dataclass(frozen=True)
class RewardResult:
    """What a reward function returned for one response: the outcome reward, further numbers,
    further rewards by token, and the answer that it found in the response (``pred``)."""

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    token_rewards: TokenRewards = ()
    answer: str | None = None


def read_result(result: Any) -> RewardResult:
    """Read a result: see the module. Entries that are neither numbers nor rewards are dropped.
    NoScore if there is no score, or a reward that is not a finite number."""
    if isinstance(result, RewardResult):
        return result
    if not isinstance(result, Mapping):
        if number(result) is None and _items(result) is not None:
            return RewardResult(0.0, {}, _token_rewards(result))
        return RewardResult(_score(result))
    if "score" not in result and "token_rewards" not in result:
        keys = _shown(", ".join(map(repr, result)) or "nothing")
        raise NoScore(f"is missing: the dict that the function returned holds {keys}")
    score = _score(result.get("score", 0.0))
    rewards = _token_rewards(result.get("token_rewards", ()))
    own = {"score", "token_rewards"}
    numbers = {
        valid_text(str(name)): number(value) for name, value in result.items() if name not in own
    }
    found = {name: value for name, value in numbers.items() if value is not None}
    return RewardResult(score, found, rewards, _answer(result.get(ANSWER)))


def _answer(value: Any) -> str | None:
    if isinstance(value, str):
        return valid_text(value.strip()[:ANSWER_CHARACTERS])
    given = number(value)
    return None if given is None else f"{given:.15g}"


def place_rewards(rewards: TokenRewards, length: int) -> list[float]:
    """The reward of each of ``length`` tokens of a response; empty if no token has one. NoScore if
    the number of rewards or a position does not fit the response."""
    if not rewards:
        return []
    placed, dense = [0.0] * length, not isinstance(rewards[0], Sequence)
    if dense and len(rewards) != length:
        count = f"it has {len(rewards)} token rewards"
        raise NoScore(f"is unusable: {count}, and the response has {length} tokens")
    for position, reward in enumerate(rewards) if dense else rewards:
        if not 0 <= position < length:
            where = f"a token reward is at position {position}"
            raise NoScore(f"is unusable: {where}, and the response has {length} tokens")
        placed[position] += reward
    return placed


def _score(value: Any) -> float:
    score = _finite(value)
    if score is None:
        raise NoScore(f"is {_shown(repr(value))}, not a finite number")
    return score


def _finite(value: Any) -> float | None:
    found = number(value)
    return None if found is None or not abs(found) <= LARGEST else found


def _token_rewards(value: Any) -> TokenRewards:
    items = _items(value)
    if items is not None:
        rewards = [_finite(item) for item in items]
        if None not in rewards:
            return [reward for reward in rewards if reward is not None]
        pairs = [_pair(item) for item in items]
        if None not in pairs:
            return [pair for pair in pairs if pair is not None]
    forms = "neither one finite number for each token nor (position, number) pairs"
    raise NoScore(f"is unusable: its token rewards are {_shown(repr(value))}, {forms}")


def _pair(item: Any) -> tuple[int, float] | None:
    found = _items(item)
    if found is None or len(found) != 2:
        return None
    position, reward = number(found[0]), _finite(found[1])
    if position is None or reward is None or not position.is_integer():
        return None
    return int(position), reward


def _items(value: Any) -> list[Any] | None:
    """The items of a list, a tuple, a NumPy array or a torch tensor, else None."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        value = tolist()
    return list(value) if isinstance(value, list | tuple) else None


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
