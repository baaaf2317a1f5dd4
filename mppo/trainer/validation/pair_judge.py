"""``mppo-evaluate --judge``: responses and other answers, judged in pairs by a generative model.

Each pair is asked about twice, in both orders, because judges favour a place (Zheng et al. 2023,
https://arxiv.org/abs/2306.05685). TRL's judges shuffle the order instead.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.rewards.remote.json_exchange import RewardServer, ServerFailure
from mppo.safety.foreign_text import quoted
from mppo.safety.input_files import read_text

if TYPE_CHECKING:  # it imports torch
    from mppo.batch.prompt import Prompt


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


KEY_VARIABLE = "MPPO_JUDGE_API_KEY"
"""Environment variable of the judge's key."""
_TIMEOUT_S = 120.0
_ROWS_BYTES = 1 << 32

Place = tuple[str, int, int]
"""Data source, index of the prompt, and number of the sample."""


@dataclass(frozen=True)
class Opponent:
    """A judge, and the answers that the evaluated model's are compared with: the other model's
    samples by place; None: the prompts' ground truths."""

    server: RewardServer
    model: str
    rows: Mapping[Place, Mapping[str, Any]] | None

    def check(self, prompts: Sequence[Prompt], samples: int) -> None:
        """Raise ConfigError if a prompt has no reference, or the other model did not answer it."""
        for prompt in prompts:
            if self.rows is None:
                if not prompt.ground_truth.strip():
                    why = f"prompt {prompt.uid} of {prompt.data_source} has no ground truth"
                    raise _issue("--judge", self.server.shown_url, why, "pass --against")
                continue
            for sample in range(samples):
                row = self.rows.get((prompt.data_source, prompt.uid, sample))
                if row is None or row["ground_truth"] != prompt.ground_truth:
                    why = f"has no sample {sample} of prompt {prompt.uid} of {prompt.data_source}"
                    fix = "write it with the same data and rollout.val_kwargs.n (--samples)"
                    raise _issue("--against", "", why, fix)

    def judge(self, lines: Sequence[str]) -> Judgements:
        """Compare responses; ConfigError if the judge did not judge a single pair."""
        pairs = []
        for row in map(json.loads, lines):
            other = row["ground_truth"] if self.rows is None else self.rows[_place(row)]["response"]
            pairs.append(Pair(row["prompt"], row["response"], other))
        found = judge_pairs(pairs, self.server, self.model)
        if not found.judged:
            why = f"judged none of {len(pairs)} pairs: {found.reason}"
            raise _issue("--judge", self.server.shown_url, why, "see to the judge's server")
        return found


def read_opponent(url: str | None, model: str | None, against: Path | None) -> Opponent | None:
    """The judge of the command line; None without ``--judge``. ConfigError: an option without the
    one it needs, an invalid URL or key, or a file that holds no samples."""
    if url is None:
        for option, value in (("--judge-model", model), ("--against", against)):
            if value is not None:
                raise _issue(option, str(value), "has no effect without --judge", "pass both")
        return None
    if model is None:
        raise _issue("--judge", url, "needs the judge's name", "pass --judge-model")
    key = KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None
    names = {"url_key": "--judge", "env_key": KEY_VARIABLE, "timeout_key": None}
    server = RewardServer(url, _TIMEOUT_S, key, **names)
    return Opponent(server, model, None if against is None else _read_rows(against))


def _read_rows(file: Path) -> dict[Place, Mapping[str, Any]]:
    try:
        rows = [json.loads(line) for line in read_text(file, _ROWS_BYTES).splitlines() if line]
        found = {_place(row): row for row in rows if isinstance(row["response"], str)}
        if found and all("ground_truth" in row for row in rows):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _issue("--against", str(file), f"holds no samples ({error})", _WRITE) from error
    raise _issue("--against", str(file), "holds no samples", _WRITE)


_WRITE = "give a file that mppo-evaluate --samples wrote"


def _place(row: Mapping[str, Any]) -> Place:
    return row["data_source"], row["index"], row["sample"]


def _issue(key: str, value: str, why: str, fix: str) -> ConfigError:
    return ConfigError([ConfigIssue(key, value, why, fix)], "arguments")
