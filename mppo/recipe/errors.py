"""Issues of a recipe, and the error that lists them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.safety.foreign_text import visible
from mppo.safety.input_error import InputError
from mppo.safety.redact import HIDDEN, is_secret_name, redact, redact_text


@dataclass(frozen=True)
class ConfigIssue:
    """One thing wrong with a recipe: a dotted key, or the file or option at issue; its value, of
    which the message hides secrets; why, and what to do."""

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


class ConfigError(InputError):
    """All issues (at least one) of one recipe; ``source``: its file, or how it was given."""

    def __init__(self, issues: Sequence[ConfigIssue], source: str = "recipe") -> None:
        assert issues, "a ConfigError without an issue"
        self.issues = tuple(issues)
        self.source = source
        count = "1 issue" if len(issues) == 1 else f"{len(issues)} issues"
        lines = [f"  {number}. {issue}" for number, issue in enumerate(issues, start=1)]
        super().__init__(printable("\n".join([f"{source}: {count}", *lines])))


def config_error(key: str, value: Any, why: str, fix: str, source: str = "recipe") -> ConfigError:
    """The error of a single issue."""
    return ConfigError([ConfigIssue(key, value, why, fix)], source)


def path_issues(
    key: str, name: str, check: Callable[[str, str], Iterator[ConfigIssue]]
) -> list[ConfigIssue]:
    """The issues that ``check`` finds, or one for a path that is invalid or not readable."""
    try:
        return list(check(key, name))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return [ConfigIssue(key, name, why, "give a path that can be read")]


def printable(text: str) -> str:
    """The text with unprintable characters other than line breaks as escapes: parts of it may come
    from a file, and a terminal would execute controls and reorder text by marks of direction."""
    return "\n".join(map(visible, text.split("\n")))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to ``word``, or None if no candidate is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
