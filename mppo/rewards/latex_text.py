"""Answers in LaTeX compared as text, as MATH's evaluation compares them.

The equalities are those of verl's ``reward_score/math_reward.py`` (0.7.0), which has them from the
evaluation of Hendrycks et al. 2021, "Measuring mathematical problem solving with the MATH dataset".
``tests/unit/verl_scores.json`` holds scores of verl's own function.
"""

from __future__ import annotations

import re


class _NotSpelled(Exception):
    """A fraction or a root without an argument, or two units."""


_INTEGER = r"(0|-?[1-9][0-9]{0,4299})"
"""An integer as Python prints it; 4300 digits are the most that Python reads."""


def boxed_as_text(response: str) -> str | None:
    """The content of the last ``\\boxed{...}``, or of ``\\boxed ...`` up to a dollar sign; None if
    there is no box, or if the last one is not closed."""
    if "\\boxed " in response:
        return response.rpartition("\\boxed ")[2].partition("$")[0]
    _, box, rest = response.rpartition("\\boxed")
    if not box or not rest.startswith("{"):
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def same_latex(given: str, right: str) -> bool:
    """Whether two answers are equal apart from spelling; as they stand if one cannot be spelled."""
    try:
        return _spell(given) == _spell(right)
    except _NotSpelled:
        return given == right


def spelled_latex(answer: str) -> str:
    """An answer in the spelling that is compared; as it stands if it cannot be spelled."""
    try:
        return _spell(answer)
    except _NotSpelled:
        return answer


def _spell(text: str) -> str:
    """One spelling for the fractions, roots, units and spaces that MATH's answers vary in."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise _NotSpelled
    text = text.replace("\\\\%", "").replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(rf"\A{_INTEGER}/{_INTEGER}\Z", r"\\frac{\1}{\2}", text)


def _brace_roots(text: str) -> str:
    r"""``\sqrt3`` as ``\sqrt{3}``."""
    first, *roots = text.split("\\sqrt")
    if not all(roots):
        raise _NotSpelled
    return first + "".join(
        "\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots
    )


def _brace_fractions(text: str) -> str:
    r"""``\frac12`` and ``\frac1{2}`` as ``\frac{1}{2}``; the text itself if one has half of its
    arguments only."""
    first, *fractions = text.split("\\frac")
    braced = [first]
    for fraction in fractions:
        if not fraction:
            raise _NotSpelled
        if fraction[0] != "{":
            if len(fraction) == 1:
                return text
            below = fraction[1:] if fraction[1] == "{" else f"{{{fraction[1]}}}{fraction[2:]}"
            fraction = f"{{{fraction[0]}}}{below}"
        braced += ["\\frac", fraction]
    return "".join(braced)
