"""Metrics of validation with several samples per prompt, answers, and the lines of samples."""

from __future__ import annotations

import json

import pytest
import torch

from mppo import register
from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.result import read_result
from mppo.rewards.scorer import build_scorer
from mppo.rewards.verifiers import extract_answer
from mppo.trainer.validation.validation_metrics import (
    metrics_table,
    sample_metrics,
    validation_metrics,
)
from mppo.trainer.validation.validation_stage import sample_lines, write_lines


def episode(source: str, uid: int, finish: str = "stop", length: int = 3) -> Episode:
    prompt = Prompt(uid, torch.tensor([1]), source, "17", "12+5=")
    return Episode(prompt, ((0, length),), finish)


def judged(*scores: float, answers: str = "", knows: bool = True) -> list[ResponseScore]:
    return [
        ResponseScore(score, answer=answers[i] if answers else None, right=score == 1 or None)
        if knows
        else ResponseScore(score)
        for i, score in enumerate(scores)
    ]


def test_estimates_are_reported_by_source_and_the_last_k_is_the_core():
    episodes = [episode("a", uid) for uid in (0, 1) for _ in range(4)] + [episode("b/c", 2)] * 4
    scores = judged(1, 1, 0, 0, 0, 0, 0, 1, answers="xxyyyyyx")
    found = sample_metrics(with_scores(episodes, scores + judged(0.0, 1.0, 2.0, 3.0, knows=False)))
    assert found == pytest.approx(
        {
            "val-core/a/reward/mean@4": 0.375,
            "val-aux/a/acc/pass@1": 0.375,
            "val-aux/a/acc/pass@2": ((1 - 1 / 6) + 0.5) / 2,
            "val-core/a/acc/pass@4": 1.0,
            "val-aux/a/acc/maj@2": (0.5 + 0.0) / 2,
            "val-core/a/acc/maj@4": (1.0 + 0.0) / 2,
            "val-core/b/c/reward/mean@4": 1.5,
            "val-aux/b/c/reward/best@2": 14 / 6,
            "val-core/b/c/reward/best@4": 3.0,
        }
    )
    assert sample_metrics(with_scores([episode("a", 0), episode("a", 1)], judged(1, 0))) == {}


def test_lengths_and_cut_responses_of_validation_are_reported():
    episodes = [episode("a", 0, "length", 7), episode("a", 1)]
    found = validation_metrics(with_scores(episodes, judged(1, 0)))
    assert found["val/response_length/mean"] == 5
    assert found["val/response_length/clip_ratio"] == 0.5


def test_the_table_has_a_row_per_source_and_a_column_per_metric():
    metrics = {
        "val-core/a/reward/mean": 0.5, "val-aux/a/acc/pass@2": 1.0, "val-core/a/acc/pass@10": 1.0,
        "val-core/long/name/reward/mean": 0.25, "val-aux/long/name/length/mean": 12.0,
        "val/reward": 0.4,
    }  # fmt: skip
    assert metrics_table(metrics, ["a", "long/name"]) == [
        "data source  acc/pass@2  acc/pass@10  reward/mean  length/mean",
        "a                1.0000       1.0000       0.5000",
        "long/name                                  0.2500      12.0000",
    ]


@pytest.mark.parametrize(
    ("verifier", "response", "answer"),
    [
        ("exact", " 17\n", "17"),
        ("final_answer", r"so \boxed{Red Fox}.", "redfox"),
        ("gsm8k", "1,234 then #### 1,234.50", "1234.50"),
        ("gsm8k", "#### -0017", "-0017"),
        ("gsm8k", "17", ""),
        ("gsm8k_flexible", "first 12, then $17.00", "17"),
        ("gsm8k_flexible", "none", ""),
        ("choice", "(A), no: (C).", "C"),
        ("choice", "?", ""),
        ("math", r"\boxed{\frac1 2} and 3", r"\frac{1}{2}"),
        ("math", r"\boxed{\sqrt}", r"\sqrt"),
        ("math", "It is\n$x + 1$", ""),
        ("math_flexible", r"\boxed{\frac{1} {2}}", r"\frac{1}{2}"),
        ("math_flexible", r"\boxed{1,000.0}", "1000"),
        ("math_flexible", "It is\n$x + 1$", "x+1"),
        ("reasoning_gym", "<answer> ZEBRA </answer>", "ZEBRA"),
        ("code", "print(1)", None),
        ("exact", "x" * 999, "x" * 256),
    ],
)
def test_answers(verifier, response, answer):
    assert extract_answer(verifier, response) == answer


@pytest.mark.parametrize(
    ("result", "numbers", "answer"),
    [
        ({"score": 1, "acc": 0, "pred": " x "}, {"acc": 0.0}, "x"),
        ({"score": 1, "pred": 2}, {"pred": 2.0}, "2"),
        ({"score": 1, "pred": "\ud800 7"}, {}, "? 7"),
        ({"score": 1, "pred": ["x"]}, {}, None),
        (1.0, {}, None),
    ],
)
def test_a_functions_answer_is_verls_pred(result, numbers, answer):
    found = read_result(result)
    assert (found.score, found.numbers, found.answer) == (1.0, numbers, answer)


def test_whether_a_response_is_right_does_not_depend_on_the_shaping_of_its_score(tmp_path):
    tokenizer = load_tokenizer(resolve_model("builtin:tiny", tmp_path / "models"))
    prompt = Prompt(0, torch.tensor([1]), "gsm8k", "17", "12+5=")
    texts = ("#### 17", "#### 17,", "#### 18", "none")
    ids = [tokenizer(text)["input_ids"] for text in texts]
    tokens = [EpisodeTokens(x, [0.0] * len(x)) for x in ids]
    episodes = [Episode.sampled(prompt, each, "length", 0) for each in tokens]
    scorer = build_scorer(RewardConfig(missing_eos_penalty=0.5, clip=0.25), tokenizer)
    scores = scorer.score(episodes)
    assert [each.score for each in scores] == [-0.25, -0.25, -0.5, -0.5]
    assert [each.right for each in scores] == [True, True, False, False]
    assert [each.answer for each in scores] == ["17", "17", "18", ""]
    write_lines(
        tmp_path / "new" / "0.jsonl", sample_lines(with_scores(episodes, scores), tokenizer)
    )
    lines = [json.loads(line) for line in (tmp_path / "new" / "0.jsonl").open()]
    assert lines[1] == {
        "data_source": "gsm8k", "index": 0, "sample": 1, "prompt": "12+5=",
        "response": "#### 17,", "ground_truth": "17", "answer": "17", "right": True,
        "score": -0.25, "numbers": {}, "error": None, "length": len(ids[1]),
        "finish_reason": "length",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["9", "1,", r"\boxed{", r"\boxed{}", "#### ", " ", "A ", "-$", "x\n"]
)
@pytest.mark.parametrize("verifier", [*register.verifier])
def test_answers_of_hostile_responses_are_short_and_found_in_linear_time(verifier, text):
    # quadratic time would be minutes
    answer = extract_answer(verifier, text * (300_000 // len(text)))
    assert answer is not None
    assert len(answer) <= 256
