"""Reward functions: arguments, results and failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.function import extra_info, load_function
from mppo.rewards.response import Response
from mppo.rewards.result import RewardResult
from mppo.rewards.scores import FailedScore, read_scores

VERL_ROW = {
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train", "answer": "2+2 #### 4", "question": "2+2?"},
}


def response(extra=None, text="17"):
    return Response(Prompt(41, (1,), "gsm8k", "4", "2+2?", extra or {}), text)


def scored(result, on_error="stop"):
    (score,) = read_scores([result], [response()], on_error)
    return score


def test_a_verl_function_sees_its_rows_extra_info_itself():
    for _ in range(2):
        found = extra_info(response(VERL_ROW).prompt)
        assert found == VERL_ROW["extra_info"]
        found.clear()  # does not change the row
    assert extra_info(response({"extra_info": None}).prompt) == {}


def test_without_such_a_column_a_function_sees_the_others_and_the_prompt(tmp_path):
    row = {"level": 3, "extra_info": "text"}
    seen = {**row, "prompt": "2+2?"}
    assert extra_info(response(row).prompt) == seen
    body = (
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return {{'score': 1, 'seen': extra_info == {seen!r}, 'text': 'x'}}\n"
    )
    (tmp_path / "sees.py").write_text(body)
    judge = load_function(f"{tmp_path}/sees.py:score", {})
    assert judge([response(row)]) == [RewardResult(1.0, {"seen": 1.0}, [])]


@pytest.mark.parametrize(
    "one",
    [
        1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), np.ones((1, 1)),
        torch.tensor(1.0), torch.tensor([1]), torch.ones(1, requires_grad=True),
        torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(True),
    ],
)  # fmt: skip
def test_python_numpy_and_torch_numbers_are_numbers(one):
    for score in (scored(one), scored({"score": one, "acc": one})):
        assert score.score == 1.0
        assert type(score.score) is float
    assert score.numbers == {"acc": 1.0}


def test_further_numbers_are_kept_by_name_and_texts_are_not():
    found = scored({"score": 0.5, "acc": np.bool_(False), "format": torch.tensor(2), "pred": "x"})
    assert found == ResponseScore(0.5, {"acc": 0.0, "format": 2.0}, answer="x", right=False)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            {"acc": 1, "format": 0},
            r"prompt 41 .* is missing: the dict .* holds 'acc', 'format';",
        ),
        ({}, "is missing: the dict that the function returned holds nothing"),
        ({"score": None}, "is None, not a finite number"),
        (None, "is None, not a finite number"),
        ("1", "is '1', not a finite number"),
        (float("inf"), "is inf, not a finite number"),
        (torch.tensor(float("nan")), r"is tensor\(nan\), not a finite number"),
        (torch.tensor([1.0, 2.0]), "it has 2 token rewards, and the response has 0 tokens"),
        (np.ones(2), "it has 2 token rewards, and the response has 0 tokens"),
        (1e39, r"is 1e\+39, not a finite number"),
        (10**400, r"is 10+\.\.\., not a finite number"),
        (1j, "not a finite number"),
        ([1.0], "it has 1 token rewards, and the response has 0 tokens"),
        ("x" * 10**6, r"is 'x{70,80}\.\.\., not a finite number"),
        (FailedScore("prompt 41 was too much"), "prompt 41 was too much"),
    ],
)
def test_what_cannot_be_judged_is_reported_or_gets_the_score_of_on_error(result, message):
    with pytest.raises(ValueError, match=message):
        scored(result)
    found = scored(result, on_error=-1.5)
    assert (found.score, found.numbers) == (-1.5, {})
    with pytest.raises(ValueError, match=message):
        raise ValueError(found.error)


def test_every_response_has_its_result():
    with pytest.raises(
        ValueError, match=r"prompt 41 .* is missing: 1 results came for 2 responses"
    ):
        read_scores([1.0], [response(), response()])
    scores = read_scores([1.0, 2.0, 3.0], [response(), response()], on_error=-1.0)
    assert [each.score for each in scores] == [-1, -1]
    assert all("3 results came for 2" in each.error for each in scores)


def test_the_earlier_names_of_on_error_keep_their_meaning():
    assert [RewardConfig(on_error=name).on_error for name in ("raise", "zero", 2)] == ["stop", 0, 2]


def test_a_failing_function_is_named_with_the_line_of_its_own_file(tmp_path):
    body = (
        "import json\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return inner(solution_str)\n"
        "def inner(text):\n"
        "    return json.loads(text + '}')\n"
    )
    (tmp_path / "mine.py").write_text(body)
    (result,) = load_function(f"{tmp_path}/mine.py:score", {})([response()])
    expected = (
        f"the reward function {tmp_path}/mine.py:score failed on prompt 41 (gsm8k: '2+2?'), "
        f"response '17': JSONDecodeError: Extra data: line 1 column 3 (char 2) "
        f"({tmp_path}/mine.py line 5)"
    )
    assert result == FailedScore(expected)
