"""Rule verifiers."""

import contextlib
import json
import threading
from pathlib import Path

import pytest

from mppo import register
from mppo.data.tasks import task
from mppo.recipe.errors import ConfigError
from mppo.rewards import verifiers
from mppo.rewards.verifiers import (
    extract_final,
    last_boxed,
    last_tagged,
    parse_number,
    verifier_for,
)

VERL_SCORES = json.loads((Path(__file__).parent / "verl_scores.json").read_text())
NESTED = r"so \boxed{1} or \boxed{\frac{1}{2}}"


@pytest.mark.parametrize(
    ("name", "response", "truth", "score"),
    [
        ("exact", " 17\n", "17", 1),
        ("exact", "17.", "17", 0),
        ("exact", "1717", "17", 0),
        ("exact", "", "17", 0),
        ("final_answer", r"12+5 is \boxed{17}", "17", 1),
        ("final_answer", "thinking 3\n#### 17", "17", 1),
        ("final_answer", "<answer>\n Red Fox </answer> indeed", "red fox", 1),
        ("final_answer", "Let me see.\nThe end.\n\n", "the end", 1),
        ("final_answer", r"17 \boxed{18}", "17", 0),
        ("gsm8k", "work\n#### 1,234", "1234", 1),
        ("gsm8k", "#### 3 #### -1,234.5", "-1234.5", 1),
        ("gsm8k", "#### $1,234", "$1,234", 0),
        ("gsm8k", "#### 1234", "$1,234", 1),
        ("gsm8k", "#### 3", "Ann has 3 left.\n#### 3", 1),
        ("gsm8k", "the answer is 1234", "1234", 0),
        ("gsm8k", "#### 12345", "1234", 0),
        ("gsm8k_flexible", "first 12, then 17.", "17", 1),
        ("gsm8k_flexible", "first 17, then 12.", "17", 0),
        ("gsm8k_flexible", "it is 1,000,000", "1000000.0", 1),
        ("gsm8k_flexible", "none", "17", 0),
        ("gsm8k_flexible", "5-3=2", "2", 1),
        ("choice", "I think (B) but no: C.", "C", 1),
        ("choice", "ABC", "C", 0),
        ("choice", "the answer is B", "(b)", 1),
    ],
)
def test_scores(name, response, truth, score):
    assert register.verifier[name](response, truth, {}) == score


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_the_scores_are_those_of_verls_own_functions(name):
    rows = [row for row in VERL_SCORES["rows"] if row[0] == name]
    scores = [register.verifier[name](response, truth, {}) for _, response, truth, *_ in rows]
    assert len(rows) > 190
    assert scores == [row[3] for row in rows]


@pytest.mark.parametrize("response", ["#### 18.", "#### $18", "#### 18.00", "####18", "18"])
def test_the_flexible_verifier_accepts_other_forms_of_the_number(response):
    assert register.verifier["gsm8k"](response, "18", {}) == 0
    assert register.verifier["gsm8k_flexible"](response, "18", {}) == 1


def test_the_truth_of_math_may_be_a_solution_with_its_box():
    assert verifiers.math(r"\boxed{\frac12}", r"so \boxed{\frac{1}{2}}.", {}) == 1
    assert verifiers.math("1/2", r"so \boxed{\frac{1}{2}}.", {}) == 0


def test_negative_last_number_keeps_its_sign():
    assert verifiers.gsm8k_flexible("the answer is -3", "-3", {}) == 1
    assert verifiers.gsm8k_flexible("the answer is -3", "3", {}) == 0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{x^2 + 2x + 1}", r"$(x+1)^2$", 1),
        (r"\boxed{3} no, \boxed{4}", "3", 0),
        (r"\boxed{}", "3", 0),
        ("I do not know", "3", 0),
    ],
)
def test_flexible_math_is_judged_by_value(response, truth, score):
    pytest.importorskip("math_verify", reason="the optional package math-verify is missing")
    assert verifiers.math_flexible(response, truth, {}) == score


def test_flexible_math_also_works_outside_the_main_thread():
    pytest.importorskip("math_verify", reason="the optional package math-verify is missing")
    scores = []
    score = verifiers.math_flexible
    worker = threading.Thread(target=lambda: scores.append(score(r"\boxed{2}", "2", {})))
    worker.start()
    worker.join()
    assert scores == [1.0]


def test_missing_math_verify_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"mppo\[rewards\]"):
        verifiers.math_flexible("1", "1", {})


def test_reasoning_gym_gives_a_full_point_or_none():
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning_gym is missing")
    example = task("reasoning_gym:chain_sum").example(0)
    answer = example.answer
    assert verifiers.reasoning_gym(f"I say\n{answer}", answer, example.extra) == 1
    assert verifiers.reasoning_gym(f"{answer} or 5", answer, example.extra) == 0
    assert verifiers.reasoning_gym("", answer, example.extra) == 0


def test_partial_credit_is_the_share_of_right_positions():
    partial = verifiers.exact_partial
    assert partial("123", "124", {}) == pytest.approx(2 / 3)
    assert partial("1234", "12", {}) == 0.5
    assert partial("", "12", {}) == 0
    assert partial("12", "12", {}) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("arithmetic", "exact"),
        ("reasoning_gym:countdown", "reasoning_gym"),
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("lighteval/MATH", "math"),
        ("math_dapo", "math_flexible"),
        ("aime2024", "math_flexible"),
        ("numina_olympiads", "math_flexible"),
        ("cais/mmlu", "choice"),
    ],
)
def test_the_data_source_selects_the_verifier(source, name):
    assert verifier_for(source) == name


def test_unknown_data_source_lists_the_verifiers():
    with pytest.raises(ConfigError, match=r"(?s)'poems'.*exact"):
        verifier_for("poems")


@pytest.mark.parametrize("piece", ["aime/", "/mmlu", "code\n/", "math-/"])
def test_a_long_name_of_a_data_source_is_read_in_time_proportional_to_its_length(piece):
    """A search in quadratic time would take hours for these names of a megabyte."""
    name = piece * (1_000_000 // len(piece))
    with contextlib.suppress(ConfigError):
        verifier_for(f"{name}\n?")


def test_boxed_and_final_answers():
    assert last_boxed(NESTED) == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed("none") is None
    assert extract_final("") == ""
    assert extract_final("a\n\nb \n") == "b"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{a} \boxed{b {c}", "a"),
        (r"\boxed{a {\boxed{b", None),
        (r"} \boxed{a}} {", "a"),
        ("\\boxed{" * 200_000 + "x}", "x"),
        ("\\boxed{" * 200_000, None),
    ],
)
def test_the_last_closed_box_counts(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>a</answer> <answer>b</answer> <answer>c", "b"),
        ("<answer>a<answer>b</answer></answer>", "a<answer>b"),
        ("</answer><answer>", None),
        ("<answer>" * 200_000, None),
    ],
)
def test_the_last_closed_answer_tag_counts(text, content):
    assert last_tagged(text) == content


def test_numbers_are_compared_exactly_however_long():
    same = [("1,000", "1000.00"), ("$-0.50", "-.5"), ("-0", "0"), ("007", "7"), ("٣", "3")]
    assert all(parse_number(a) == parse_number(b) for a, b in same)
    nines = "9" * 1_000_000
    assert parse_number(nines) == parse_number(f"0{nines}.0")
    assert parse_number(nines) != parse_number(f"{nines}.1")
    assert parse_number("5") != parse_number("-5")
    assert parse_number("1.") is parse_number("x") is None
    assert verifiers.gsm8k_flexible(f"#### {nines}", "17", {}) == 0


def test_a_ground_truth_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="'many' is not a number"):
        verifiers.gsm8k("#### 3", "many", {})
