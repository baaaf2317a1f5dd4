"""Scores with all that a reward function may add, for tests of their exchange."""

from __future__ import annotations

import math
import random
import struct
from array import array
from dataclasses import asdict
from typing import Any

from mppo.batch.score import ResponseScore
from mppo.rewards.scores import UNSCORED

NUMBERS = (0.1, -0.0, 5e-324, 3.4e38, math.inf, -math.inf, math.nan, 1 / 3)
NAMES = ("acc", "format", "größe", "half \ud800", "")
TEXTS = ("", "42", "größer\n\0", "\N{GRINNING FACE}", "\ud800", "x" * 256)


def random_scores(count: int) -> dict[int, ResponseScore]:
    """Scores by key; each key is used once."""
    draw = random.Random(count)
    found: dict[int, ResponseScore] = {}
    for index in range(count):
        rewards = array("d", draw.choices(NUMBERS[:4], k=draw.choice((0, 1, 7)))) or ()
        names = draw.sample(NAMES, draw.randint(0, len(NAMES)))
        found[index * 3 + (index % 5 << 40)] = ResponseScore(
            draw.choice(NUMBERS),
            {name: draw.choice(NUMBERS) for name in names},
            draw.choice((None, *TEXTS)),
            draw.choice((None, *UNSCORED)),
            sum(rewards),
            rewards,
            draw.choice((None, *TEXTS)),
            draw.choice((None, False, True)),
        )
    return found


def plain(score: ResponseScore) -> dict[str, Any]:
    """A score as values that are equal if all bits are."""
    numbers = {name: struct.pack("d", value) for name, value in score.numbers.items()}
    exact = {name: struct.pack("d", getattr(score, name)) for name in ("score", "token_total")}
    rewards = array("d", score.token_rewards).tobytes()
    return asdict(score) | exact | {"numbers": numbers, "token_rewards": rewards}
