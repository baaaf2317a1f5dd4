"""Rules that compare a response with the ground truth: pure functions of text.

A verifier gives 1 for a right answer and 0 for any other. Only ``partial_credit`` gives values in
between: a policy that gets half a point for half an answer learns to give half answers.

The time of a verifier is linear in the length of the response, whatever its content. The verifiers
of ``PACKAGES`` cannot guarantee that and run in worker processes with a time limit.
"""

from __future__ import annotations

import importlib
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mppo import register
from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.rewards.latex_text import boxed_as_text, same_latex, spelled_latex
from mppo.rewards.result import ANSWER_CHARACTERS
from mppo.safety.input_error import InputError

Verifier = Callable[[str, str, Mapping[str, Any]], float]
"""(response, ground truth, the prompt's ``extra``) -> score."""

_DECIMAL = r"[-$]{0,2}(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(_DECIMAL)
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
"""The form of verl's scorer: one space, no dollar sign."""
GSM8K_END = 300
"""Characters at the end of a response in which ``gsm8k`` looks for the answer, as verl's scorer."""
CHOICE = re.compile(r"(?<![A-Za-z])\(?([A-J])\)?(?![A-Za-z])")
BOXED = "\\boxed{"
BRACES = re.compile(r"\\boxed\{|[{}]")


def exact(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the response equals the answer, apart from leading and trailing white space."""
    return float(response.strip() == ground_truth.strip())


def exact_partial(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """Return the share of positions at which response and answer hold the same character.

    The longer of the two is the denominator, so that a long or an empty response gains nothing; the
    score is 1 only if they are equal.
    """
    response, ground_truth = response.strip(), ground_truth.strip()
    longest = max(len(response), len(ground_truth))
    same = sum(given == right for given, right in zip(response, ground_truth))
    return same / longest if longest else 1.0


def final_answer(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the final answer (``extract_final``) equals the ground truth, apart from case, spaces
    and a closing full stop."""
    return float(without_spaces(extract_final(response)) == without_spaces(ground_truth))


def gsm8k(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the last ``#### NUMBER`` (GSM8K's form) is the ground truth, as text without commas.

    This is verl's strict scorer (``reward_score/gsm8k.py``, 0.7.0): neither ``#### 18.`` nor
    ``#### $18`` nor ``#### 18.00`` is 18, and only the last ``GSM8K_END`` characters count.
    """
    right = ground_truth.rpartition("####")[2].strip().replace(",", "").replace("$", "")
    if parse_number(right) is None:
        raise InputError(f"the ground truth {ground_truth!r} is not a number")
    return float(gsm8k_answer(response) == right)


def gsm8k_answer(response: str) -> str | None:
    """The number of the last ``#### NUMBER`` without commas; None if there is none."""
    found = GSM8K_ANSWER.findall(response[-GSM8K_END:])
    return found[-1].replace(",", "") if found else None


def gsm8k_flexible(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the last number in the response equals the ground truth by value."""
    value = parse_number(ground_truth.rpartition("####")[2])
    if value is None:
        raise InputError(f"the ground truth {ground_truth!r} is not a number")
    return float(parse_number(_last(NUMBER, response)) == value)


def choice(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the last option letter, A to J, alone or in parentheses, is the ground truth."""
    given = _last(CHOICE, response)
    return float(given != "" and given == ground_truth.strip().strip("()").upper())


def math(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the last ``\\boxed{}`` is the ground truth as text (``same_latex``): verl's scorer."""
    boxed, right = boxed_as_text(response), last_boxed(ground_truth)
    return float(boxed is not None and same_latex(boxed, ground_truth if right is None else right))


def math_flexible(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if response and ground truth are mathematically equal for the package math-verify.

    If the response has a ``\\boxed{}``, only the last one counts. The time is not bounded: sympy
    never finishes ``9^{9^{9^9}}``.
    """
    package = import_math_verify()
    boxed = last_boxed(response)
    given = f"${boxed}$" if boxed is not None else response
    right = last_boxed(ground_truth) or ground_truth.strip("$ ")
    parsed = [package.parse(text, parsing_timeout=None) for text in (f"${right}$", given)]
    if not all(parsed):
        return 0.0
    return float(package.verify(*parsed, timeout_seconds=None))


def reasoning_gym(response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
    """1 if the task family's scorer gives the final answer (``extract_final``) a full score.

    Families give part of a point to an answer that only contains the right one, hence the
    threshold. Some call ``eval`` on the answer, so this must run in a confined process.
    """
    entry = gym_entry(extra)
    scorer = importlib.import_module("reasoning_gym").get_score_answer_fn(extra["reasoning_gym"])
    return float(scorer(answer=extract_final(response), entry=entry) >= 1.0)


_OWN: dict[str, Verifier] = {
    "exact": exact,
    "final_answer": final_answer,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "choice": choice,
    "math": math,
    "math_flexible": math_flexible,
    "reasoning_gym": reasoning_gym,
}
register.verifier.fill(_OWN)

PACKAGES = {"math_flexible": "math_verify", "reasoning_gym": "reasoning_gym"}
"""The verifiers that pass the response to a package, by the package's name. The package may need
any time or memory for the response, or even execute it."""

PARTIAL: dict[str, Verifier] = {"exact": exact_partial}
"""The verifiers that can give partial credit."""

CODE = "code"
"""The verifier that runs programs: ``extras/sandbox``, or a server (``RuleReward.programs``)."""

BY_DATA_SOURCE: tuple[tuple[str, str], ...] = (
    (r"arithmetic|reverse|sort_digits|count_letters", "exact"),
    (r"reasoning_gym:.*", "reasoning_gym"),
    (r"(.*/)?gsm8k", "gsm8k"),
    (r"(.*/)?math([-_]?(500|lighteval))?", "math"),
    (r"(.*/)?(math[-_]?dapo|aime.*|amc.*|deepscaler.*|numina.*)", "math_flexible"),
    (r"(.*/)?(mmlu|arc|gpqa).*", "choice"),
    (r"(.*/)?(code|humaneval|mbpp|apps|taco|codecontests|livecodebench).*", CODE),
)
"""The verifier of each data source: a pattern for the full name in any case; the first match
counts. ``.`` matches line breaks too, so that ``.*`` reaches the end of any name at once."""


def load_in_worker(
    name: str,
) -> Callable[[Sequence[tuple[str, str, Mapping[str, Any]]]], list[float]]:
    """Import a verifier of ``PACKAGES`` and its package; return its function of several items:
    (response, ground truth, extra). The first call initialises caches of the package, here and
    once, so that the processes forked afterwards share them."""
    verify = _OWN[name]
    importlib.import_module(PACKAGES[name])
    if name == "math_flexible":
        # math-verify warns that its time is not bounded; the worker pool bounds it
        logging.getLogger(PACKAGES[name]).setLevel(logging.ERROR)
        verify(r"\boxed{\frac{1}{2} x^2}", "0.5x^2", {})
    return lambda items: [verify(*item) for item in items]


def verifier_for(data_source: str) -> str:
    """The verifier of a data source; ConfigError if no pattern matches it."""
    if name := known_verifier(data_source):
        return name
    why = f"no verifier is known for the data source {data_source!r}"
    fix = (
        f"set it to one of {', '.join(register.verifier.names)}, or set reward.name=function and "
        "reward.function"
    )
    raise ConfigError([ConfigIssue("reward.verifier", None, why, fix)])


def unknown(key: str, name: str, known: Sequence[str]) -> ConfigIssue:
    guess = nearest(name, known)
    meant = f"did you mean {guess!r}? " if guess else ""
    return ConfigIssue(
        key, name, "no such verifier", f"{meant}the verifiers are {', '.join(known)}"
    )


def known_verifier(data_source: str) -> str | None:
    """Return the name of the verifier for a data source; None: no pattern matches it."""
    for pattern, name in BY_DATA_SOURCE:
        if re.fullmatch(pattern, data_source, re.IGNORECASE | re.DOTALL):
            return name
    return None


def gym_entry(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reasoning_gym entry from which a row was made; InputError if it has none."""
    if extra.get("entry") is None:
        raise InputError("the row has no reasoning_gym entry: use data.task=reasoning_gym:NAME")
    return extra["entry"]


def import_math_verify() -> Any:
    """Import math_verify; a ConfigError says how to install it."""
    try:
        return importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        why = f"it needs the package {error.name}, which is not installed"
        issue = ConfigIssue("reward.verifier", "math_flexible", why, 'pip install "mppo[rewards]"')
        raise ConfigError([issue]) from error


def extract_final(response: str) -> str:
    """Return the final answer of a response, without the reasoning before it.

    The first of these that exists: the last ``\\boxed{}``; the last ``<answer></answer>``; what
    follows the last ``####``; the last line that is not empty; an empty string.
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
    """Content of the last complete ``\\boxed{...}`` with nested braces; None if there is none."""
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
    """Content of the last complete ``<answer></answer>``; None if there is none."""
    found, end = None, 0
    while (start := text.find("<answer>", end)) >= 0:
        start += len("<answer>")
        end = text.find("</answer>", start)
        if end < 0:
            break
        found = text[start:end]
    return found


def _last(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.findall(text)
    return found[-1] if found else ""


def parse_number(text: str) -> tuple[bool, str, str] | None:
    """Parse a decimal number with optional thousands commas and dollar sign into a canonical form:
    whether it is negative, the digits before the point without leading zeros, and those after it
    without trailing zeros. None if the text is not a number.

    The digits stay text, because the conversion of a million digits to an integer takes minutes.
    """
    digits = text.strip().replace(",", "").replace("$", "")
    if not re.fullmatch(r"-?(\d+(\.\d+)?|\.\d+)", digits):
        return None
    if not digits.isascii():  # \d matches the digits of every script
        digits = "".join(str(unicodedata.decimal(sign, sign)) for sign in digits)
    integer, _, fraction = digits.lstrip("-").partition(".")
    integer, fraction = integer.lstrip("0"), fraction.rstrip("0")
    return digits.startswith("-") and bool(integer or fraction), integer, fraction


def without_spaces(text: str) -> str:
    """A text in lower case, without white space and a closing full stop."""
    return "".join(text.lower().split()).removesuffix(".")


def extract_answer(verifier: str, response: str) -> str | None:
    """The answer that a verifier reads in a response, in one spelling for equal answers.

    At most ``ANSWER_CHARACTERS`` characters; empty if the response has no answer; None for a
    verifier that reads none, such as ``code``. Answers of ``math_flexible`` are equal if their
    texts are, apart from spaces and the spelling of numbers: the package that compares them as
    formulas compares only pairs.
    """
    if verifier not in _EXTRACT:
        return None
    return _EXTRACT[verifier](response)[:ANSWER_CHARACTERS]


def _spelled(text: str) -> str:
    """A number in one spelling; other text without white space at its ends."""
    number = parse_number(text)
    if number is None:
        return text.strip()
    negative, integer, fraction = number
    return f"{'-' * negative}{integer or '0'}{'.' * bool(fraction)}{fraction}"


_EXTRACT: dict[str, Callable[[str], str]] = {
    "exact": str.strip,
    "final_answer": lambda response: without_spaces(extract_final(response)),
    "gsm8k": lambda response: gsm8k_answer(response) or "",
    "gsm8k_flexible": lambda response: _spelled(_last(NUMBER, response)),
    "choice": lambda response: _last(CHOICE, response),
    "math": lambda response: spelled_latex(boxed_as_text(response) or ""),
    "math_flexible": lambda response: _spelled(without_spaces(extract_final(response).strip("$ "))),
    "reasoning_gym": extract_final,
}
