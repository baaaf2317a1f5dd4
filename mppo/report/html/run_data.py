"""What the HTML report shows of one run folder, as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mppo.recipe.document import MAX_BYTES, leaves, parse_yaml
from mppo.report.code_files import kept_code
from mppo.report.files import METRICS, RECIPE, SAMPLES
from mppo.report.history import History, Rows, read_history
from mppo.report.html.headline import headline
from mppo.report.html.reduced import rounded
from mppo.report.html.timelines import newest_timelines
from mppo.report.html.token_trees import token_trees
from mppo.report.run_record import Status, read_events, read_status
from mppo.report.warning_rules import WarningSpan, warning_spans
from mppo.safety.input_files import read_text
from mppo.safety.redact import redact, redact_text

_SAMPLES = 24

Plain = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """A run folder as the page needs it."""

    name: str
    rows: Rows
    recipe: Mapping[str, Any]
    details: Plain
    code: Mapping[str, str]


def read_run_data(folder: Path, runs: History | None = None) -> RunData:
    """Read a run folder; what is missing or damaged is left out, except that a line of
    metrics.jsonl that is not valid raises ValueError. ``runs``: its metrics, if they are in
    memory."""
    rows = runs.rows if runs is not None else []
    if runs is None and (folder / METRICS).is_file():
        rows = read_history(folder / METRICS)
    recipe = _recipe(folder / RECIPE)
    last = max((step for step, _ in rows), default=0)
    trainer = recipe.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    parts = [trainer.get("project_name"), trainer.get("experiment_name")]
    name = "/".join(map(str, parts)) if all(parts) else folder.resolve().name
    status, warnings = read_status(folder), warning_spans(rows)
    shown = f"{last} steps"
    if status is not None:
        shown = redact_text(f"{status.status}: {last} of {status.total_steps} steps")
    details = {
        "folder": redact_text(str(folder.resolve())),
        "status": shown,
        "headline": headline(rows, warnings, status is not None and status.status == "failed"),
        "warnings": [_warning(span) for span in warnings],
        "events": _events(folder, status),
        "samples": _samples(folder / SAMPLES, last),
        "tokens": token_trees(folder, last),
        "timelines": newest_timelines(folder, last),
    }
    flat = dict(leaves(redact(recipe)))
    return RunData(redact_text(name), rows, flat, details, kept_code(folder))


def _warning(span: WarningSpan) -> Plain:
    text = redact_text(str(span.warning))
    return {"first": span.first, "last": span.last, "ongoing": span.ongoing, "text": text}


def _recipe(path: Path) -> Plain:
    try:
        recipe = parse_yaml(read_text(path, MAX_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _events(folder: Path, status: Status | None) -> list[Plain]:
    """The events; a start after some steps is a resume, and a run without an end goes on."""
    found: list[Plain] = []
    running = False
    for event in read_events(folder):
        resumed = event.kind == "start" and event.step
        kind, text = "resumed" if resumed else event.kind, redact_text(event.text)
        found.append({"kind": kind, "step": event.step, "time": event.time, "text": text})
        running = event.kind == "start" or (running and event.kind not in ("end", "died"))
    if running and status is not None and status.status == "running":
        text = "running when this page was made, or ended without a report"
        found.append({"kind": "running", "step": None, "time": "", "text": text})
    return found


def _samples(path: Path, last: int) -> list[Plain]:
    found: list[Plain] = []
    try:
        lines = read_text(path).split("\n")  # texts may hold other separators
    except (OSError, ValueError):
        return []
    for line in lines:
        try:
            row = json.loads(line)
            texts = {name: str(row[name]) for name in ("prompt", "response", "ground_truth")}
            texts |= {name: str(row.get(name) or "") for name in ("answer", "place")}
            (score,) = rounded([float(row["score"])])
            if int(row["step"]) <= last:
                found.append({"step": int(row["step"]), **texts, "score": score})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return redact(found[-_SAMPLES:])
