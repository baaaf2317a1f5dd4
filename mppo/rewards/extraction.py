"""The final answer in a response, as the verifiers read it: for votes and for tables of samples."""

from __future__ import annotations

from collections.abc import Callable

from mppo.rewards.latex_text import boxed_as_text, spelled_latex
from mppo.rewards.result import ANSWER_CHARACTERS
from mppo.rewards.verifiers import (
    CHOICE,
    NUMBER,
    extract_final,
    gsm8k_answer,
    parse_number,
    without_spaces,
)


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


def _last_number(found: list[str]) -> str:
    return _spelled(found[-1]) if found else ""


def _spelled(text: str) -> str:
    """A number in one spelling; other text without white space at its ends."""
    number = parse_number(text)
    if number is None:
        return text.strip()
    negative, integer, fraction = number
    return f"{'-' * negative}{integer or '0'}{'.' * bool(fraction)}{fraction}"


def _final(response: str) -> str:
    return without_spaces(extract_final(response).strip("$ "))


def _choice(response: str) -> str:
    found = CHOICE.findall(response)
    return found[-1] if found else ""


_EXTRACT: dict[str, Callable[[str], str]] = {
    "exact": str.strip,
    "final_answer": lambda response: without_spaces(extract_final(response)),
    "gsm8k": lambda response: gsm8k_answer(response) or "",
    "gsm8k_flexible": lambda response: _last_number(NUMBER.findall(response)),
    "choice": _choice,
    "math": lambda response: spelled_latex(boxed_as_text(response) or ""),
    "math_flexible": lambda response: _spelled(_final(response)),
    "reasoning_gym": extract_final,
}
