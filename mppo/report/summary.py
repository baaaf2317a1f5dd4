"""The run report, one page of Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from mppo.report import history
from mppo.report.console import SAMPLE_COLUMNS, SampleRow, format_duration
from mppo.report.history import History, figures, phase_times
from mppo.report.pictures import calibration_lines, load_rows
from mppo.report.warning_rules import warning_spans
from mppo.safety.foreign_text import visible

PACKAGES = ("mppo", "torch", "megatron-core", "transformers", "sglang")


def run_report(
    name: str,
    status: str,
    seconds: float,
    runs: History,
    samples: Mapping[int, Sequence[SampleRow]],
    recipe: Mapping[str, Any],
) -> str:
    """The report as Markdown. ``seconds``: of this process, without the time before a resume."""
    steps = [step for step, _ in runs.rows]
    lines = [f"# {name}", "", f"{status.capitalize()} after {max(steps, default=0)} steps, "]
    lines[-1] += f"{format_duration(seconds)}. Recipe: `recipe.yaml`; numbers: `metrics.jsonl`."
    lines += _warnings(runs)
    lines += ["", "![reward and KL](reward_kl.png)", "", *_figures(runs), *_phases(runs)]
    if load_rows(runs):
        lines += ["", "## Load of the experts", "", "![load of the experts](expert_load.png)"]
    if calibration_lines(runs):
        picture = "![values and returns](value_calibration.png)"
        lines += ["", "## Calibration of the critic", "", picture]
    for step, rows in samples.items():
        lines += ["", f"## Samples at step {step}", "", markdown_table(rows)]
    lines += ["", "## Setting", "", *_setting(recipe)]
    return "\n".join(lines) + "\n"


def _warnings(runs: History) -> list[str]:
    """A line for each warning, the ongoing ones first."""
    lines = []
    for span in warning_spans(runs.rows):
        steps = f"step {span.first}" + (f" to {span.last}" if span.last > span.first else "")
        when = f"{steps}, until the end" if span.ongoing else steps
        lines.append(f"- {when}: {span.warning}")
    return ["", "## Warnings", "", *lines] if lines else []


def _figures(runs: History) -> list[str]:
    lines = ["| | first | last | best |", "|---|---|---|---|"]
    for each in figures(runs.rows):
        best = "" if each.best is None else f"{each.best:.4g}"
        lines.append(f"| {each.label} | {each.first:.4g} | {each.last:.4g} | {best} |")
    return [*lines, "", "First and last: means over the first and last tenth of the steps."]


def _phases(runs: History) -> list[str]:
    times = phase_times(runs.rows)
    if not times:
        return []
    lines = ["", "## Where the time goes", "", "| phase | seconds | share |", "|---|---|---|"]
    for each in times:
        name = f"of which {each.name}" if each.is_part else each.name
        lines.append(f"| {name} | {each.seconds:.1f} | {100 * each.share:.0f}% |")
    _, ahead = runs.series(f"timing_s/{history.AHEAD}")
    if ahead:
        lines += ["", f"Generating ahead, during these phases, took {sum(ahead):.1f} s."]
    return lines


def markdown_table(rows: Sequence[SampleRow]) -> str:
    """A table of samples in Markdown; long texts are cut."""
    lines = [f"| {' | '.join(SAMPLE_COLUMNS)} |", "|---" * len(SAMPLE_COLUMNS) + "|"]
    lines += [f"| {' | '.join(map(_cell, row.cells()))} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    shown = visible(text if len(text) <= 300 else text[:297] + "...")
    for char in "\\|`<>*_":
        shown = shown.replace(char, f"\\{char}")
    return shown


def _setting(recipe: Mapping[str, Any]) -> list[str]:
    model, data = recipe.get("model", {}), recipe.get("data", {})
    sources = "; ".join(
        source.get("task") or ", ".join(source.get("train_files", ()))
        for source in data.get("sources") or [data]
    )
    lines = [f"- model: {model.get('path', '?')} ({model.get('dtype', '?')})", f"- data: {sources}"]
    lines.append(f"- ranks: {os.environ.get('WORLD_SIZE', '1')}, cores: {os.cpu_count()}")
    found = {name: _version(name) for name in PACKAGES}
    installed = [f"{name} {version}" for name, version in found.items() if version]
    lines.append(f"- Python {platform.python_version()}, {', '.join(installed)}")
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
