"""Pairwise judgement of responses by a generative model behind an OpenAI-style chat endpoint.

Each pair is asked about twice, in both orders, because judges favour a place (Zheng et al. 2023,
https://arxiv.org/abs/2306.05685). TRL's judges shuffle the order instead.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from mppo.rewards.remote.server import RewardServer, ServerFailure
from mppo.safety.foreign_text import quoted

Verdict = Literal["A", "B", "C"]
"""The first answer, the second answer, or neither is better."""

QUESTION = """\
Compare two answers to the same prompt. Judge how helpful, correct and complete each is, not its \
length or its place. Explain briefly, then end with [[A]] if answer A is better, [[B]] if answer B \
is better, or [[C]] if they are equally good.

[Prompt]
{prompt}

[Answer A]
{first}

[Answer B]
{second}
"""
_VERDICT = re.compile(r"\[\[([ABC])\]\]")
_PLACES = re.compile(r"\{(prompt|first|second)\}")
_ATTEMPTS = 3
_REQUESTS_AT_A_TIME = 8
_MAX_TOKENS = 512
_SHOWN = 200


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt: the evaluated model's, and the one it is compared with."""

    prompt: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class Judgements:
    """How often the evaluated model's answer was better in both orders of a pair, or the other; any
    other pair with two verdicts is a tie, those without are failures, most for this ``reason``."""

    wins: int
    ties: int
    losses: int
    failures: int
    reason: str

    @property
    def judged(self) -> int:
        return self.wins + self.ties + self.losses

    @property
    def win_rate(self) -> float:
        """``(wins + ties / 2) / judged``; NaN if nothing was judged."""
        return (self.wins + self.ties / 2) / self.judged if self.judged else math.nan

    def metrics(self) -> dict[str, float]:
        """The numbers under ``judge/``; the interval holds 95% (Wilson)."""
        low, high = wilson_interval(self.win_rate, self.judged)
        return {
            "judge/win_rate": self.win_rate,
            "judge/win_rate_low": low,
            "judge/win_rate_high": high,
            "judge/wins": float(self.wins),
            "judge/ties": float(self.ties),
            "judge/losses": float(self.losses),
            "judge/failures": float(self.failures),
        }

    def line(self) -> str:
        low, high = wilson_interval(self.win_rate, self.judged)
        failed = f"; {self.failures} pairs not judged, most: {self.reason}" if self.failures else ""
        return (
            f"judge: win rate {self.win_rate:.3f} (95% {low:.3f} to {high:.3f}) over {self.judged} "
            f"pairs: {self.wins} wins, {self.ties} ties, {self.losses} losses{failed}"
        )


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Low and high end of the 95% interval of a proportion (Wilson 1927); NaN for no observations.
    ``(p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n)`` with z = 1.959964, p the observed
    ``rate`` and n the ``count`` of observations."""
    if not count:
        return math.nan, math.nan
    z = 1.959964
    square = z * z / count
    centre = rate + square / 2
    spread = z * math.sqrt(rate * (1 - rate) / count + square / (4 * count))
    return (centre - spread) / (1 + square), (centre + spread) / (1 + square)


def judge_pairs(pairs: Sequence[Pair], server: RewardServer, model: str) -> Judgements:
    """Ask the judge, at ``.../v1/chat/completions``, about every pair, in both orders."""

    from mppo.supervision.phase import tick  # it imports torch

    def both_orders(pair: Pair) -> Verdict | str:
        try:
            ours_first = _ask(server, model, pair.prompt, pair.ours, pair.theirs)
            theirs_first = _ask(server, model, pair.prompt, pair.theirs, pair.ours)
        except ServerFailure as failure:
            return f"failed: {failure}"
        return combined(ours_first, theirs_first)

    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        found: Counter[str] = Counter()
        for verdict in pool.map(both_orders, pairs):
            found[verdict] += 1
            tick()
    judged = [found.pop(verdict, 0) for verdict in ("A", "C", "B")]
    reason = found.most_common(1)[0][0].removeprefix("failed: ") if found else ""
    return Judgements(*judged, failures=found.total(), reason=reason)


def combined(ours_first: Verdict, theirs_first: Verdict) -> Verdict:
    """The verdict on a pair, with ours as A: a win where both of its orders agree, else a tie."""
    swapped: dict[Verdict, Verdict] = {"A": "B", "B": "A", "C": "C"}
    return ours_first if ours_first == swapped[theirs_first] else "C"


def _ask(server: RewardServer, model: str, prompt: str, first: str, second: str) -> Verdict:
    """The verdict on two answers in this order; ServerFailure if no attempt gave one."""
    values = {"prompt": prompt, "first": first, "second": second}
    # in one pass: an answer that contains {second} stays as it is
    text = _PLACES.sub(lambda place: values[place[1]], QUESTION)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": _MAX_TOKENS,
    }
    for attempt in range(_ATTEMPTS):
        try:
            return _verdict(server, server.post(body))
        except ServerFailure as failure:
            if not failure.retry or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _verdict(server: RewardServer, answer: Any) -> Verdict:
    try:
        text = answer["choices"][0]["message"]["content"]
        found = _VERDICT.findall(text)
    except (KeyError, IndexError, TypeError):
        raise ServerFailure("no text in choices[0].message.content", retry=False) from None
    if not found:
        shown = quoted(text[-_SHOWN:])
        raise ServerFailure(f"no [[A]], [[B]] or [[C]] in the judge's answer: {shown!r}", False)
    return found[-1]
