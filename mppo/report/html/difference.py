"""In what runs differ: keys of their recipes, and the code that they name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mppo.report.html.run_data import RunData

_LINES = 400
"""Most lines of a difference of two files."""


def recipe_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The recipes' keys: of several runs those that differ, of one run all."""
    keys = sorted({key for run in runs for key in run.recipe})
    rows = [{"key": key, "values": [_shown(run.recipe, key) for run in runs]} for key in keys]
    if len(runs) == 1:
        return rows
    return [row for row in rows if len(set(row["values"])) > 1]


def _shown(recipe: Mapping[str, Any], key: str) -> str:
    return json.dumps(recipe[key], default=str) if key in recipe else ""


def code_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The kept code, rows of ``title`` and ``lines``: of one run each file, of several the
    difference of each to the first run."""
    first, *others = runs
    if not others:
        return [{"title": name, "lines": text.splitlines()} for name, text in first.code.items()]
    rows = []
    for run in others:
        for key in sorted({_key(name) for name in (*first.code, *run.code)}):
            (before, old), (after, new) = _of(first, key), _of(run, key)
            if old == new:
                continue
            named = (f"{first.name}: {before}", f"{run.name}: {after}")
            lines = list(difflib.unified_diff(old, new, *named, lineterm="", n=2))
            if len(lines) > _LINES:
                lines = [*lines[:_LINES], f"... and {len(lines) - _LINES} lines more"]
            rows.append({"title": f"{key}: {run.name} against {first.name}", "lines": lines})
    return rows


def _key(name: str) -> str:
    return name.partition(": ")[0]


def _of(run: RunData, key: str) -> tuple[str, list[str]]:
    files = {name: text for name, text in run.code.items() if _key(name) == key}
    names = ", ".join(name.partition(": ")[2] for name in files) or "not kept"
    return names, [line for text in files.values() for line in text.splitlines()]
