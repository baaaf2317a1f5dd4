"""Rules that compare a response with the ground truth: pure functions of text.

A verifier gives 1 for a right answer and 0 for any other. Nothing in between, unless a recipe asks
for partial credit: half a point for half an answer is what a policy learns to collect.

The time of a verifier grows in proportion to the length of the response, whatever it says; those of
``PACKAGES`` cannot promise that, and run in processes of their own.
"""

from __future__ import annotations

import importlib
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue

Verifier = Callable[[str, str, Mapping[str, Any]], float]
"""(response, ground truth, the prompt's ``extra``) -> score."""

_DECIMAL = r"[-$]{0,2}(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(_DECIMAL)
GSM8K_ANSWER = re.compile(rf"####\s*({_DECIMAL})")
CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-J])\)?(?![A-Za-z])")
BOXED = "\\boxed{"
BRACES = re.compile(r"\\boxed\{|[{}]")


def exact(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """The whole response is the answer, white space around it aside."""
    return float(response.strip() == ground_truth.strip())


def exact_partial(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """Share of positions at which response and answer hold the same character.

    The longer of the two counts, so that neither rambling nor silence gains; 1 only where equal.
    """
    response, ground_truth = response.strip(), ground_truth.strip()
    longest = max(len(response), len(ground_truth))
    same = sum(given == wanted for given, wanted in zip(response, ground_truth))
    return same / longest if longest else 1.0


def final_answer(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """What stands in the last ``\\boxed{}``, in ``<answer></answer>``, after ``####``, or on the
    last line is the answer; case, spaces and a closing full stop aside."""
    return float(_plain(extract_final(response)) == _plain(ground_truth))


def gsm8k(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """The last ``#### NUMBER`` is the answer (GSM8K's own form)."""
    found = GSM8K_ANSWER.findall(response)
    return _same_number(found[-1] if found else "", ground_truth)


def gsm8k_flexible(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """The last number in the response is the answer."""
    found = NUMBER.findall(response)
    return _same_number(found[-1] if found else "", ground_truth)


def choice(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """The last option letter, A to J, alone or in parentheses, is the answer."""
    found = CHOICE.findall(response)
    return float(bool(found) and found[-1] == ground_truth.strip().strip("()").upper())


def math(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """Mathematically equal, as the package math-verify judges.

    Where the response has a ``\\boxed{}``, only the last one counts. Takes as long as sympy does:
    forever for ``9^{9^{9^9}}``.

    Raises:
        ConfigError: math-verify is not installed.
    """
    package = import_math_verify()
    boxed = last_boxed(response)
    given = f"${boxed}$" if boxed is not None else response
    wanted = last_boxed(ground_truth) or ground_truth.strip("$ ")
    parsed = [package.parse(text, parsing_timeout=None) for text in (f"${wanted}$", given)]
    if not all(parsed):
        return 0.0
    return float(package.verify(*parsed, timeout_seconds=None))


def reasoning_gym(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """The task family's own scorer, a full score or nothing.

    The answer is what ``extract_final`` finds. Families give parts of a point to answers that
    merely contain the right one, hence the threshold. Some give the answer to ``eval``: only for a
    process that may do nothing.
    """
    entry = gym_entry(extra)
    scorer = importlib.import_module("reasoning_gym").get_score_answer_fn(extra["reasoning_gym"])
    return float(scorer(answer=extract_final(response), entry=entry) >= 1.0)


VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "final_answer": final_answer,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "choice": choice,
    "math": math,
    "reasoning_gym": reasoning_gym,
}

PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""The verifiers that hand text of the model to a package which may take any time or memory for it,
or even run it."""

PARTIAL: dict[str, Verifier] = {"exact": exact_partial}
"""The verifiers that know partial credit, in that form."""

CODE = "code"
"""The verifier that runs programs; it lives in ``mppo.rewards.workers.sandbox``."""

BY_DATA_SOURCE: tuple[tuple[str, str], ...] = (
    (r"arithmetic|reverse|sort_digits|count_letters", "exact"),
    (r"reasoning_gym:.*", "reasoning_gym"),
    (r"(.*/)?gsm8k", "gsm8k"),
    (r"(.*/)?(math([-_]?(500|lighteval|dapo))?|aime.*|amc.*|deepscaler.*|numina.*)", "math"),
    (r"(.*/)?(mmlu|arc|gpqa).*", "choice"),
    (r"(.*/)?(code|humaneval|mbpp|apps|taco|codecontests|livecodebench).*", CODE),
)
"""Which verifier a data source gets (whole name, any case); the first match wins."""


def load_in_worker(name: str) -> Callable[[tuple[str, str, Mapping[str, Any]]], float]:
    """A verifier of ``PACKAGES`` for (response, ground truth, extra), its package loaded and warm:
    what grows with the first call need not grow again in each process forked afterwards."""
    verify = VERIFIERS[name]
    importlib.import_module(PACKAGES[name])
    if name == "math":
        # it warns that nothing bounds its time; here something does
        logging.getLogger(PACKAGES[name]).setLevel(logging.ERROR)
        verify(r"\boxed{\frac{1}{2} x^2}", "0.5x^2", {})
    return lambda item: verify(*item)


def verifier_for(data_source: str) -> str:
    """Name of the verifier for a data source.

    Raises:
        ConfigError: none is known for it.
    """
    for pattern, name in BY_DATA_SOURCE:
        if re.fullmatch(pattern, data_source, re.IGNORECASE):
            return name
    why = f"no verifier is known for the data source {data_source!r}"
    fix = f"one of {', '.join([*VERIFIERS, CODE])}; or reward.name=function with reward.function"
    raise ConfigError([ConfigIssue("reward.verifier", None, why, fix)])


def gym_entry(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of reasoning_gym that a row was made of.

    Raises:
        ValueError: it has none.
    """
    if extra.get("entry") is None:
        raise ValueError("the row has no reasoning_gym entry: use data.task=reasoning_gym:NAME")
    return extra["entry"]


def import_math_verify() -> Any:
    """The package, or a ConfigError that says how to get it."""
    try:
        return importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        why = f"it needs the package {error.name}, which is not installed"
        issue = ConfigIssue("reward.verifier", "math", why, 'pip install "mppo[rewards]"')
        raise ConfigError([issue]) from error


def extract_final(response: str) -> str:
    """The final answer of a response that may think aloud first.

    In this order: the last ``\\boxed{}``; the last ``<answer></answer>``; what follows the last
    ``####``; the last line that is not empty; an empty text.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed.strip()
    tagged = last_tagged(response)
    if tagged is not None:
        return tagged.strip()
    if "####" in response:
        response = response.rpartition("####")[2]
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}``, nested braces kept; None without one."""
    opened: list[int] = []
    last = -1
    end = 0
    for match in BRACES.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match[0] == BOXED else -1)
        elif opened:
            start = opened.pop()
            if start > last:
                last, end = start, match.start()
    return text[last:end] if last >= 0 else None


def last_tagged(text: str) -> str | None:
    """Content of the last complete ``<answer></answer>``; None without one."""
    found, end = None, 0
    while (start := text.find("<answer>", end)) >= 0:
        start += len("<answer>")
        end = text.find("</answer>", start)
        if end < 0:
            break
        found = text[start:end]
    return found


def _same_number(given: str, wanted: str) -> float:
    given_value, wanted_value = parse_number(given), parse_number(wanted.rpartition("####")[2])
    if wanted_value is None:
        raise ValueError(f"the ground truth {wanted!r} is no number")
    return float(given_value == wanted_value)


def parse_number(text: str) -> tuple[bool, str, str] | None:
    """A decimal number with optional thousands commas and dollar sign, in the one form that every
    number has: whether it is negative, the digits before the point without leading zeros, those
    after it without trailing zeros. None for another text.

    Text, because turning a million digits into a number takes minutes.
    """
    digits = text.strip().replace(",", "").replace("$", "")
    if not re.fullmatch(r"-?(\d+(\.\d+)?|\.\d+)", digits):
        return None
    if not digits.isascii():  # \d matches the digits of every script
        digits = "".join(str(unicodedata.decimal(sign, sign)) for sign in digits)
    whole, _, part = digits.lstrip("-").partition(".")
    whole, part = whole.lstrip("0"), part.rstrip("0")
    return digits.startswith("-") and bool(whole or part), whole, part


def _plain(text: str) -> str:
    return "".join(text.lower().split()).removesuffix(".")
