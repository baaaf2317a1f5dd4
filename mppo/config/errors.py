"""Faults of a recipe, told to a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.safety.redact import HIDDEN, is_secret_name, redact, redact_text


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a recipe.

    Args:
        key: dotted key, or the file or option at fault.
        value: what was given; shown without secrets.
        why: what is wrong with it.
        cure: what would be right.
    """

    key: str
    value: Any
    why: str
    cure: str

    def __str__(self) -> str:
        key, why, cure = map(redact_text, (self.key, self.why, self.cure))
        if self.value and any(is_secret_name(part) for part in self.key.split(".")):
            given = str(self.value)
            why, cure = why.replace(given, HIDDEN), cure.replace(given, HIDDEN)
            shown = repr(HIDDEN)
        else:
            shown = repr(redact(self.value))
        if len(shown) > 120:
            shown = shown[:117] + "..."
        return f"{key} = {shown}\n     why:  {why}\n     cure: {cure}"


class ConfigError(ValueError):
    """Every fault of one recipe.

    Args:
        faults: at least one.
        source: the recipe file, or how the recipe was given.
    """

    def __init__(self, faults: Sequence[Fault], source: str = "recipe") -> None:
        assert faults, "a ConfigError without a fault"
        self.faults = tuple(faults)
        self.source = source
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, start=1)]
        super().__init__(printable("\n".join([f"{source}: {count}", *lines])))


def printable(text: str) -> str:
    """A text of which parts come from files, without what a terminal would obey."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 10}


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None where nothing is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
