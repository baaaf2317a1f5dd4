"""The report as one HTML file that needs no network: plots by uPlot, samples, events, recipes.

uPlot (MIT licence, in ``assets``) draws 10,000 steps in a fraction of a second and is 50 KB;
Plotly's bundle is 4.5 MB per report and takes seconds for as many points.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from mppo.report.files import PAGE
from mppo.report.history import History
from mppo.report.html.plots import metric_list, plots_of, trained_steps
from mppo.report.html.run_data import RunData, read_run_data
from mppo.safety.disk import replace_text
from mppo.safety.foreign_text import valid_text

_ASSETS = Path(__file__).parent / "assets"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""The browser must not load anything from another place."""


def page_data(folders: Sequence[Path], runs: History | None = None) -> dict[str, Any]:
    """What a page shows of some runs; ``runs`` are the metrics of the only folder, if they are in
    memory. ValueError if a line of a metrics.jsonl is not valid."""
    found = [read_run_data(folder, runs) for folder in folders]
    return {
        "runs": [
            {"name": name, "steps": trained_steps(run), **run.details}
            for name, run in zip(_names(found, folders), found, strict=True)
        ],
        "plots": plots_of(found),
        "metrics": metric_list(found),
        "recipes": recipe_rows(found),
        "code": code_rows(found),
    }


def write_page(folder: Path, runs: History) -> None:
    replace_text(folder / PAGE, page_text(page_data([folder], runs)))


def page_text(data: Mapping[str, Any], live: bool = False) -> str:
    """The page of ``page_data``; with ``live`` it asks its server for newer data every few
    seconds."""
    # no "</script>" and no "<!--" inside the data
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = " and ".join(run["name"] for run in data["runs"])
    return f"""<!doctype html>
<html lang="en"{" data-live" if live else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(valid_text(title))}</title>
<style>{_asset("uPlot.min.css")}{_asset("page.css")}</style>
</head>
<body>
<main id="page"></main>
<script type="application/json" id="data">{text}</script>
<script>/* uPlot, MIT licence, Copyright (c) Leon Sorokin */{_asset("uPlot.iife.min.js")}</script>
<script>{_asset("timeline.js")}{_asset("page.js")}</script>
</body>
</html>
"""


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def _names(runs: Sequence[RunData], folders: Sequence[Path]) -> list[str]:
    """The runs' names; with the folder where two runs have one name."""
    names = [run.name for run in runs]
    return [
        f"{name} ({run.details['folder']})" if names.count(name) > 1 else name
        for name, run in zip(names, runs)
    ]


_LINES = 400
"""Most lines of a difference of two files."""


def recipe_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The recipes' keys: of several runs those that differ, of one run all."""
    keys = sorted({key for run in runs for key in run.recipe})
    rows = []
    for key in keys:
        recipes = [run.recipe for run in runs]
        values = [json.dumps(one[key], default=str) if key in one else "" for one in recipes]
        if len(runs) == 1 or len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


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
