"""Applies verl's rows to a recipe as read: verl's keys become ours, remarks, or issues."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.verl.role_rows import ROLE_ROWS
from mppo.config.verl.row import Converted, Ignored, Refused, VerlRow
from mppo.config.verl.run_rows import RUN_ROWS


class Settled:
    """A recipe without verl's own keys.

    Args:
        document: nested mapping whose keys are ours where ``RENAMED`` has them; not changed.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document: dict[str, Any] = _copied(document)
        self.issues: list[ConfigIssue] = []
        """One for every reason to refuse keys, and for every key given twice."""
        self.remarks: list[str] = []
        """A line for every reason to ignore or convert keys."""
        self._join_reward_function()
        told: dict[Ignored | Refused, list[tuple[str, Any]]] = {}
        for parts, value in list(_leaves(self.document)):
            row = row_of(parts, value)
            if row is None:
                continue
            key = ".".join(parts)
            _pop(self.document, parts)
            if isinstance(row.fate, Converted):
                target, ours = row.fate.target(parts), row.fate.ours(value)
                self._set(target, ours, key, value)
            else:
                told.setdefault(row.fate, []).append((key, value))
        for fate, keys in told.items():
            self._tell(fate, keys)

    def _tell(self, fate: Ignored | Refused, keys: list[tuple[str, Any]]) -> None:
        """What has no effect or is refused for the same reason, together."""
        if isinstance(fate, Ignored):
            named = ", ".join(f"{key}={value}" for key, value in keys)
            self.remarks.append(f"no effect: {named} ({fate.why})")
            return
        values = [value for _, value in keys]
        alike = all(value == values[0] for value in values)
        named = ", ".join(key for key, _ in keys)
        self.issues.append(ConfigIssue(named, values[0] if alike else values, fate.why, fate.fix))

    def _set(self, key: str, ours: Any, name: str, value: Any) -> None:
        """Set our key for verl's; a issue where it is given too, with another value."""
        *sections, last = key.split(".")
        section = self.document
        for part in sections:
            if not isinstance(section.setdefault(part, {}), dict):
                return  # not a section: told when the recipe is validated
            section = section[part]
        if last in section and section[last] != ours:
            why = f"means {key} = {ours!r}, also given as {section[last]!r}"
            self.issues.append(ConfigIssue(name, value, why, f"keep {key} only"))
            return
        section[last] = ours
        self.remarks.append(f"{name}={value} is taken as {key}={ours}")

    def _join_reward_function(self) -> None:
        """verl names a reward function by file and name, a recipe by ``file:name``."""
        given = self.document.get("custom_reward_function")
        if not isinstance(given, dict) or not given.get("path"):
            return
        del self.document["custom_reward_function"]
        name, path = "custom_reward_function.path", given["path"]
        function = f"{path}:{given.get('name') or 'compute_score'}"
        self._set("reward.name", "function", name, path)
        self._set("reward.function", function, name, path)


def row_of(parts: Sequence[str], value: Any) -> VerlRow | None:
    """The first row about a key and its value; None where there is none."""
    for pattern, row in _patterns():
        if len(pattern) > len(parts) or (row.values is not None and value not in row.values):
            continue
        if all(wanted in ("*", part) for wanted, part in zip(pattern, parts)):
            return row
    return None


@cache
def _patterns() -> tuple[tuple[tuple[str, ...], VerlRow], ...]:
    """Every name of every row, its alternatives written out."""
    rows = (*ROLE_ROWS, *RUN_ROWS)
    return tuple((tuple(name.split(".")), row) for row in rows for name in _names(row.names))


def _names(pattern: str) -> Iterator[str]:
    """``{a,b}.c`` is ``a.c`` and ``b.c``."""
    pieces = re.split(r"\{(.*?)\}", pattern)
    options = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    for choice in product(*options):
        yield "".join(choice)


def _leaves(document: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple]:
    """Path and value of everything that is not a section with keys in it."""
    for name, value in document.items():
        if not isinstance(name, str):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _copied(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sections anew: YAML's aliases make one section stand in two places."""
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in document.items()}


def _pop(document: dict[str, Any], parts: Sequence[str]) -> None:
    """Take a key out, and the sections this leaves empty."""
    head, *rest = parts
    if rest:
        _pop(document[head], rest)
        if not document[head]:
            del document[head]
    else:
        del document[head]
