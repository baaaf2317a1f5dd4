"""Issues of a recipe, told to a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.safety.redact import HIDDEN, is_secret_name, redact, redact_text


@dataclass(frozen=True)
class ConfigIssue:
    """One thing wrong with a recipe.

    Args:
        key: dotted key, or the file or option at issue.
        value: what was given; shown without secrets.
        why: what is wrong with it.
        fix: what would be right.
    """

    key: str
    value: Any
    why: str
    fix: str

    def __str__(self) -> str:
        key, why, fix = map(redact_text, (self.key, self.why, self.fix))
        if self.value and any(is_secret_name(part) for part in self.key.split(".")):
            given = str(self.value)
            why, fix = why.replace(given, HIDDEN), fix.replace(given, HIDDEN)
            shown = repr(HIDDEN)
        else:
            shown = repr(redact(self.value))
        if len(shown) > 120:
            shown = shown[:117] + "..."
        return f"{key} = {shown}\n     why:  {why}\n     fix: {fix}"


class ConfigError(ValueError):
    """Every issue of one recipe.

    Args:
        issues: at least one.
        source: the recipe file, or how the recipe was given.
    """

    def __init__(self, issues: Sequence[ConfigIssue], source: str = "recipe") -> None:
        assert issues, "a ConfigError without a issue"
        self.issues = tuple(issues)
        self.source = source
        count = "1 issue" if len(issues) == 1 else f"{len(issues)} issues"
        lines = [f"  {number}. {issue}" for number, issue in enumerate(issues, start=1)]
        super().__init__(printable("\n".join([f"{source}: {count}", *lines])))


def printable(text: str) -> str:
    """A text of which parts come from files, without what a terminal would obey."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 10}


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None where nothing is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
