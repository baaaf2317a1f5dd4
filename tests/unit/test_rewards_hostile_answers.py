"""Hostile answers: every verifier gives its score in a time that the answer cannot extend."""

import time

import pytest
from patient_judge import without_hurry

from mppo import register
from mppo.batch.prompt import Prompt
from mppo.rewards import verifiers
from mppo.rewards.programs import extract_program
from mppo.rewards.response import Response
from mppo.rewards.rules import RuleReward
from mppo.rewards.scores import Unscored

SIZE = 200_000
ATTEMPTS = 5
"""What delays a process from outside only adds to its time: the least of several is its own."""
REPEATED = [
    "1", "1,", "1.", "-", "-$", "$", ".", " ", "\n", "#", "####", "#### ", "#### 1", "\u0663",
    "(", "(A", "A ", "{", "}", "\\boxed{", "\\boxed{1}", "\\boxed{1} }", "<answer>",
    "<answer></answer>", "</answer>", "`", "```", "```python\n", "```\n```", "``` \t",
]  # fmt: skip
"""An answer repeats one of these: what a pattern begins with but never ends."""


def code(response, ground_truth, extra):
    """The part of the verifier ``code`` outside the sandbox."""
    return float(extract_program(response) is None)


COMPARISONS = {
    **{name: each for name, each in register.verifier.items() if name not in verifiers.PACKAGES},
    "exact with partial credit": verifiers.exact_partial,
    "code": code,
}


def cpu_seconds(verify, text, truth):
    start = time.process_time()
    score = verify(text, truth, {})
    assert 0 <= score <= 1
    return time.process_time() - start


@pytest.mark.parametrize("name", COMPARISONS)
def test_ten_times_the_answer_takes_about_ten_times_the_time(name):
    verify, truth = COMPARISONS[name], "B" if name == "choice" else "17"
    for unit in REPEATED:
        long = unit * (SIZE // len(unit))
        for text in (long, "#### " + long + "x"):
            tenths, wholes = [], []
            for _ in range(ATTEMPTS):
                tenths.append(cpu_seconds(verify, text[: len(text) // 10], truth))
                wholes.append(cpu_seconds(verify, text, truth))
                # a quadratic time would be a hundred times as long; small times are noise
                if min(wholes) < 40 * max(min(tenths), 0.002):
                    break
            else:
                pytest.fail(f"{unit!r} ... {text[-9:]!r}: {min(wholes)} s, a tenth {min(tenths)} s")


BOXED = "\\boxed{"
BOMBS = {
    "fractions in fractions": BOXED + "\\frac{1}{" * 5000 + "1" + "}" * 5001,
    "powers of powers": BOXED + "x" + "^{x" * 2000 + "}" * 2001,
    "texts in texts": BOXED + "\\text{a" * 50_000 + "}" * 50_001,
    "a phrase of the extraction patterns": "answer is " * 100_000,
}


def test_latex_bombs_score_0_and_end_at_the_time_limit():
    pytest.importorskip("math_verify", reason="the optional package math-verify is missing")
    prompt = Prompt(0, (1,), "aime", "17", "p")
    macros = "".join(f"\\def\\{a}{{\\{b}\\{b}}}" for a, b in zip("abcdefgh", "bcdefghi"))
    judge = RuleReward("math_flexible", timeout_s=1.0)
    bombs = judge([Response(prompt, text) for text in BOMBS.values()])
    assert all(found in (Unscored("timeouts"), 0.0) for found in bombs), bombs
    others = [macros + BOXED + "\\a}", BOXED + "17}"]
    assert without_hurry(judge)([Response(prompt, text) for text in others]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "response", "truth", "score"),
    [
        ("gsm8k", "#### 17 km", "17", 1),
        ("gsm8k", "#### 17km/h.", "17", 1),
        ("gsm8k", "#### 17. ", "17", 0),
        ("gsm8k", "#### 1,234,567 dollars", "1234567", 1),
        ("gsm8k", "#### about 17", "17", 0),
        ("gsm8k", "#### 1 7", "17", 0),
        ("gsm8k", "#### 17 #### 18", "17", 0),
        ("gsm8k", "#### 17e3", "17000", 0),
        ("gsm8k_flexible", "17 km in 2 hours", "17", 0),
        ("gsm8k_flexible", "it costs $17.50, I think", "17.5", 1),
        ("final_answer", r"\boxed{\boxed{17}}", "17", 1),
        ("final_answer", r"\boxed{17 \text{ km}}", "17", 0),
        ("final_answer", r"\boxed{17} \boxed{", "17", 1),
        ("final_answer", "<answer>17</answer><answer>18", "17", 1),
        ("choice", "(A) (B) (C) (D)", "B", 0),
        ("choice", "Band", "B", 0),
        ("math_flexible", r"\boxed{\text{so }\boxed{17}}", "17", 1),
        ("math_flexible", r"\boxed{17\,\mathrm{cm}}", "17", 1),
        ("math_flexible", r"\boxed{17,000}", "17000", 1),
        ("math_flexible", r"\boxed{17,000}", "17", 0),
        ("math_flexible", r"\boxed{17 \text{ or } 18}", "17", 0),
    ],
)
def test_boxes_units_and_commas(name, response, truth, score):
    if name in verifiers.PACKAGES:
        pytest.importorskip("math_verify", reason="the optional package math-verify is missing")
    assert register.verifier[name](response, truth, {}) == score
