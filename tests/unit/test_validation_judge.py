"""Win rates by a judge: pairs, verdicts, interval, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from length_judge import LengthJudge, length_judge

from mppo.batch.prompt import Prompt
from mppo.recipe.errors import ConfigError
from mppo.rewards.remote.json_exchange import RewardServer
from mppo.trainer.validation.pair_judge import (
    KEY_VARIABLE,
    Pair,
    combined,
    judge_pairs,
    read_opponent,
    wilson_interval,
)


@pytest.fixture
def url() -> Iterator[str]:
    with length_judge() as url:
        yield url


def test_pairs_are_judged_in_both_orders(url) -> None:
    pairs = [
        Pair("p", "long answer", "short"), Pair("p", "same", "size"), Pair("p", "no", "better"),
        Pair("p", "longer", "x"), Pair("mute", "a", "b"), Pair("p", "{second}", "x"),
    ]  # fmt: skip
    found = judge_pairs(pairs, RewardServer(url), "length")
    assert (found.wins, found.ties, found.losses, found.failures) == (3, 1, 1, 1)
    assert found.win_rate == 3.5 / 5
    assert "no [[A]], [[B]] or [[C]] in the judge's answer: 'I cannot say.'" in found.reason
    assert "win rate 0.700" in found.line()
    assert "1 pairs not judged" in found.line()
    assert len(LengthJudge.seen) == 2 * 5 + 1


@pytest.mark.parametrize(
    ("ours_first", "theirs_first", "verdict"),
    [
        ("A", "B", "A"), ("B", "A", "B"), ("A", "A", "C"), ("B", "B", "C"), ("C", "C", "C"),
        ("A", "C", "C"), ("C", "A", "C"),
    ],
)  # fmt: skip
def test_a_judge_that_favours_a_place_gives_ties(ours_first, theirs_first, verdict) -> None:
    assert combined(ours_first, theirs_first) == verdict


def test_the_interval_is_wilsons() -> None:
    # 8 of 10: (0.8 + 0.19207 -+ 1.95996 sqrt(0.016 + 0.0096036)) / 1.384146
    assert wilson_interval(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-5)
    assert wilson_interval(1.0, 20)[1] == pytest.approx(1.0)
    assert math.isnan(wilson_interval(math.nan, 0)[0])


def sample(index: int, response: str, truth: str = "t") -> dict:
    return {"data_source": "s", "index": index, "sample": 0, "prompt": "p", "response": response,
            "ground_truth": truth}  # fmt: skip


def prompt(uid: int, truth: str = "t") -> Prompt:
    return Prompt(uid, [1], "s", truth, "p")  # pyright: ignore[reportArgumentType]  # is converted


def test_the_other_models_samples_are_compared(url, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(sample(i, "abc")) + "\n" for i in range(2)))
    opponent = read_opponent(url, "length", other)
    assert opponent is not None
    opponent.check([prompt(0), prompt(1)], 1)
    found = opponent.judge([json.dumps(sample(0, "abcd")), json.dumps(sample(1, "a"))])
    assert (found.wins, found.losses) == (1, 1)
    assert found.metrics()["judge/win_rate"] == 0.5
    assert set(LengthJudge.seen) == {("Bearer secret", "length")}
    for prompts, samples in ([prompt(2)], 1), ([prompt(0)], 2), ([prompt(0, "other")], 1):
        with pytest.raises(ConfigError, match="has no sample"):
            opponent.check(prompts, samples)


def test_references_are_the_ground_truths(url) -> None:
    opponent = read_opponent(url, "length", None)
    assert opponent is not None
    opponent.check([prompt(0)], 1)
    assert opponent.judge([json.dumps(sample(0, "longer", "t"))]).wins == 1
    with pytest.raises(ConfigError, match="no ground truth"):
        opponent.check([prompt(0, " ")], 1)


def test_a_judge_that_judges_nothing_is_an_error(url) -> None:
    opponent = read_opponent(url, "length", None)
    assert opponent is not None
    with pytest.raises(ConfigError, match="judged none of 1 pairs: HTTP 400"):
        opponent.judge([json.dumps(sample(0, "broken"))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, "m", None), "--judge-model.*without --judge"),
        ((None, None, "f"), "--against.*without --judge"),
        (("http://h/v1", None, None), "pass --judge-model"),
        (("h/v1", "m", None), "--judge.*not the URL"),
        (("http://h/v1", "m", "nowhere.jsonl"), "--against.*holds no samples"),
    ],
)
def test_bad_options_are_named(options, message) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_opponent(*options)
