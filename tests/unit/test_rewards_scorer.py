"""From episodes to rewards."""

import math

import pytest
from hanging_clock import hanging_clock

from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.division import ScoringError
from mppo.rewards.scorer import build_scorer, overlong_penalty
from mppo.trainer.metrics import reward_metrics
from mppo.trainer.validation.validation_metrics import validation_metrics

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(resolve_model("builtin:tiny", tmp_path_factory.mktemp("models")))


def episode(tokenizer, text, truth="17", finish="stop", uid=0, source="arithmetic", **extra):
    ids = tokenizer(text)["input_ids"] + ([EOS] if finish == "stop" else [])
    prompt = Prompt(uid, (1,), source, truth, "12+5=", extra)
    return Episode.sampled(prompt, EpisodeTokens(ids, [0.0] * len(ids)), finish, 0)


def scores_of(scorer, episodes):
    return [judgement.score for judgement in scorer.score(episodes)]


def write_module(path, body):
    path.write_text("from math import nan\n" + body)
    return str(path)


def test_rule_scores_by_data_source(tokenizer):
    scorer = build_scorer(RewardConfig(), tokenizer)
    answers = [episode(tokenizer, "17"), episode(tokenizer, "18")]
    answers.append(episode(tokenizer, "#### 17", source="gsm8k"))
    assert scores_of(scorer, answers) == [1.0, 0.0, 1.0]
    assert scores_of(scorer, []) == []


def test_one_verifier_for_all_and_partial_credit_when_asked(tokenizer):
    answers = [episode(tokenizer, "so 17"), episode(tokenizer, "18")]
    flexible = RewardConfig(verifier="gsm8k_flexible")
    assert scores_of(build_scorer(flexible, tokenizer), answers) == [1.0, 0.0]
    partial = RewardConfig(kwargs={"partial_credit": True})
    assert scores_of(build_scorer(partial, tokenizer), answers) == [0.0, 0.5]


def test_penalties_come_after_the_clip(tokenizer, tmp_path):
    body = "def score(data_source, solution_str, ground_truth, extra_info): return 5.0\n"
    name = write_module(tmp_path / "five.py", body) + ":score"
    reward = RewardConfig(name="function", function=name, clip=2.0, missing_eos_penalty=0.5)
    answers = [episode(tokenizer, "17"), episode(tokenizer, "17", finish="length")]
    assert scores_of(build_scorer(reward, tokenizer), answers) == [2.0, 1.5]


def test_a_missing_end_may_have_a_score_of_its_own(tokenizer):
    scorer = build_scorer(RewardConfig(missing_eos_score=-1.0), tokenizer)
    answers = [episode(tokenizer, "17"), episode(tokenizer, "17", finish="length")]
    answers += [episode(tokenizer, "18"), episode(tokenizer, "18", finish="abort")]
    assert scores_of(scorer, answers) == [1.0, -1.0, 0.0, -1.0]


def test_overlong_penalty_counts_the_tokens_in_the_buffer(tokenizer):
    reward = RewardConfig(overlong_buffer_len=4, overlong_penalty_factor=2.0)
    scorer = build_scorer(reward, tokenizer, max_response_length=8)
    lengths = [1, 4, 5, 6, 8]
    answers = [episode(tokenizer, "1" * n, finish="length", truth="x") for n in lengths]
    assert scores_of(scorer, answers) == [0.0, 0.0, -0.5, -1.0, -2.0]


def test_shaping_formulas():
    assert overlong_penalty(16384 + 2048, 20480, 4096, 1.0) == -0.5
    assert overlong_penalty(99999, 20480, 4096, 1.0) == -1.0


def test_a_function_sees_the_row_and_its_own_parameters(tokenizer, tmp_path):
    body = (
        "def score(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    assert data_source == 'poems' and extra_info['level'] == 3\n"
        "    assert extra_info['prompt'] == '12+5='\n"
        "    return {'score': float(solution_str == ground_truth) + bonus}\n"
    )
    name = write_module(tmp_path / "mine.py", body) + ":score"
    reward = RewardConfig(name="function", function=name, kwargs={"bonus": 0.25})
    answer = episode(tokenizer, "17", source="poems", level=3)
    assert scores_of(build_scorer(reward, tokenizer), [answer]) == [1.25]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("nan", r"prompt 41 \(arithmetic: '12\+5='\) is nan"),
        ("None", "is None, not a finite number"),
        ("'1'", "is '1', not a finite number"),
        ("1 / 0", r"(?s)failed on prompt 41 .*ZeroDivisionError"),
    ],
)
def test_a_bad_score_names_the_prompt(result, message, tokenizer, tmp_path):
    body = f"def score(data_source, solution_str, ground_truth, extra_info): return {result}\n"
    name = write_module(tmp_path / "bad.py", body) + ":score"
    scorer = build_scorer(RewardConfig(name="function", function=name), tokenizer)
    with pytest.raises(ScoringError, match=message):
        scorer.score([episode(tokenizer, "17", uid=41)])


def test_numpy_and_integer_scores_are_numbers(tokenizer, tmp_path):
    body = (
        "import numpy\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return numpy.float32(0.5) if solution_str == '1' else 1\n"
    )
    name = write_module(tmp_path / "numbers.py", body) + ":score"
    scorer = build_scorer(RewardConfig(name="function", function=name), tokenizer)
    scores = scores_of(scorer, [episode(tokenizer, "1"), episode(tokenizer, "2")])
    assert scores == [0.5, 1.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verifier": "exakt"}, "did you mean 'exact'"),
        ({"kwargs": {"partial": True}}, "did you mean 'partial_credit'"),
        ({"verifier": "gsm8k", "kwargs": {"partial_credit": True}}, "no partial credit"),
        ({"name": "function"}, r"reward\.function"),
        ({"name": "function", "function": "math"}, "module:function"),
        ({"name": "function", "function": "no_such_module:f"}, "No module named"),
        ({"name": "function", "function": "/no/such.py:f"}, "no such file"),
        ({"name": "function", "function": "math:nosuch"}, "has no function 'nosuch'"),
        ({"name": "function", "function": "os.path:join"}, "parameters do not fit"),
        ({"name": "remote"}, r"reward\.url"),
        ({"name": "remote", "url": "localhost:80"}, "is not the URL of an HTTP server"),
        ({"name": "remote", "url": "http://me:sesame@h/x"}, "holds a user or a password"),
        (
            {"name": "remote", "url": "http://h/x", "kwargs": {"api_key_env": "NO_SUCH_VARIABLE"}},
            "no such environment variable",
        ),
        ({"overlong_buffer_len": 9}, r"longer than data\.max_response_length = 8"),
    ],
)
def test_wrong_settings_are_explained(settings, message, tokenizer):
    with pytest.raises(ConfigError, match=message) as error:
        build_scorer(RewardConfig(**settings), tokenizer, max_response_length=8)
    assert "sesame" not in str(error.value)


def test_data_that_no_rule_can_score_is_found_before_the_first_rollout(tokenizer):
    scorer = build_scorer(RewardConfig(), tokenizer)
    good = [episode(tokenizer, "").prompt, episode(tokenizer, "", source="gsm8k").prompt]
    scorer.check(good)
    with pytest.raises(ConfigError, match="'poems'"):
        scorer.check([*good, episode(tokenizer, "", source="poems").prompt])
    bad = episode(tokenizer, "#### 1", truth="x", source="gsm8k", uid=7)
    with pytest.raises(ValueError, match=r"prompt 7 .*not a number"):
        scorer.check([bad.prompt])


def test_a_row_that_its_verifier_cannot_read_gets_the_score_of_on_error(tokenizer):
    bad = episode(tokenizer, "#### 1", truth="x", source="gsm8k", uid=7)
    good = episode(tokenizer, "17")
    with pytest.raises(ScoringError, match=r"prompt 7 .*not a number"):
        build_scorer(RewardConfig(), tokenizer).score([good, bad])
    assert scores_of(build_scorer(RewardConfig(on_error=-1), tokenizer), [good, bad]) == [1, -1]


def test_a_response_without_a_score_of_its_own_is_a_metric(tokenizer, tmp_path, monkeypatch):
    body = (
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return hang() if solution_str == 'slow' else 1.0\n"
    ) + hanging_clock(tmp_path / "hanging", monkeypatch)
    name = write_module(tmp_path / "slow.py", body) + ":score"
    reward = RewardConfig(name="function", function=name, on_error=-1)
    scorer = build_scorer(reward, tokenizer)
    answers = [episode(tokenizer, "slow"), episode(tokenizer, "quick")]
    scored = with_scores(answers, scorer.score(answers))
    assert [each.scored.score for each in scored] == [-1.0, 1.0]
    none = {"reward/failures": 0.0, "reward/bad_verdicts": 0.0}
    found = {"reward/timeouts": 2.0, "reward/errors": 2.0}
    assert reward_metrics(scored, scored[:1]) == none | found
    assert validation_metrics(scored)["val/reward_timeouts"] == 1.0


def test_every_score_is_finite(tokenizer):
    scorer = build_scorer(RewardConfig(missing_eos_penalty=1.0), tokenizer)
    scores = scores_of(scorer, [episode(tokenizer, "", finish=f) for f in ("stop", "length")])
    assert scores == [0.0, -1.0]
    assert all(map(math.isfinite, scores))
