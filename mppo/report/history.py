"""The metrics of a run by step, in metrics.jsonl, and its main numbers for both reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.safety.disk import naming, replace_text
from mppo.safety.foreign_text import visible
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_file

Metrics = Mapping[str, float]
Rows = Sequence[tuple[int, Metrics]]
"""Step and metrics of each logged step."""
LONGEST_NAME = 250
"""Most characters of a metric's name."""
_LIMIT = 4 << 30
"""Most bytes of a run's metrics: a million steps."""

# Metric names that the console, the plot and the run report show.
REWARD = "critic/score/mean"
VAL_REWARD = "val/reward"
KL = "objective/kl"
LENGTH = "response_length/mean"
THROUGHPUT = "perf/tokens_per_second"
MISMATCH = "training/rollout_logprob_diff_max"
STEP_TIME = "timing_s/step"
PROBE, MEMORY = "perf/rank_probe_ms/", "perf/rank_memory_gb/"
"""Prefixes of metrics of each rank: the duration of a fixed product of matrices, and the peak of
its memory."""
OF_RANKS = ("min", "median", "max")
"""In place of a rank: over all ranks, where only the ranks with the highest numbers are named."""

PARTS = {
    "log_probs": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
}
"""Timed phases, each with the timed phases inside it."""
AHEAD = "gen_ahead"
"""Generation of the next step's batch, during other phases."""
NOT_PHASES = {"step", AHEAD, *(part for inner in PARTS.values() for part in inner)}
"""Names under ``timing_s/`` that are not phases of a step: the step itself, and parts of phases."""


def metric_name(name: str) -> str:
    """A metric's name on one line, without control characters or halves of surrogate pairs, and at
    most ``LONGEST_NAME`` long: data sources and numbers of a reward function stand in names."""
    return visible(name)[:LONGEST_NAME]


class History:
    """Appends one JSON object per logged step, and keeps all of them in memory (without ``path`` in
    memory only).

    A run that resumes after step k keeps the interrupted run's lines up to k. Later lines belong to
    work that was lost, and are dropped.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._started = False

    def start(self, done: int) -> None:
        """Read the lines of the first ``done`` steps, and drop later ones; raises as
        ``read_history``."""
        self._started = True
        if self.path is None or not self.path.exists():
            return
        self.rows = [(step, row) for step, row in read_history(self.path) if step <= done]
        replace_text(self.path, "".join(_line(step, row) for step, row in self.rows))

    def append(self, step: int, metrics: Metrics) -> None:
        """Add a step. Numbers that are not finite are written as null, because JSON has no NaN."""
        if not self._started:
            self.start(step - 1)
        row = {name: float(value) for name, value in metrics.items()}
        self.rows.append((step, row))
        if self.path is not None:
            with naming(self.path), self.path.open("a") as file:
                file.write(_line(step, row))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        return series(self.rows, name)


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most ``most`` places of ``count``, evenly spaced, with the first and the last."""
    most = min(count, most)
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without values that are not finite."""
    pairs = [(step, row[name]) for step, row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def read_history(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics of each line; an incomplete last line is left out. OSError: the file cannot
    be read. InputError: the first line that a run could not have written, and the reason; or it is
    no regular file."""
    *lines, last = read_file(path, _LIMIT).split(b"\n")
    rows = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            if line:
                rows.append(_row(line))
        except ValueError as error:
            if number <= len(lines):
                raise InputError(f"{path}, line {number}: {error}") from error
    return rows


def check_history(path: Path) -> None:
    """Read the metrics of an earlier start, if there are any; ConfigError if the file is
    damaged."""
    try:
        if path.exists():
            read_history(path)
    except (ValueError, OSError) as error:
        fix = "repair that line, or move the file away: the run then continues without old metrics"
        raise ConfigError(
            [ConfigIssue(str(path), "damaged", str(error), fix)], "run folder"
        ) from error


def _row(line: bytes) -> tuple[int, dict[str, float]]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise InputError("is not a JSON object with a step")
    step = row.pop("step")
    try:
        return step, {name: math.nan if v is None else float(v) for name, v in row.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"holds something that is not a number ({error})") from error


def _line(step: int, row: Metrics) -> str:
    values = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({"step": step, **values}) + "\n"


_SHOWN: tuple[tuple[str, str, Callable[[Sequence[float]], float] | None], ...] = (
    ("mean reward", REWARD, max),
    ("validation reward", VAL_REWARD, max),
    ("KL to the reference, nats per response", KL, None),
    ("response length, tokens", LENGTH, None),
    ("largest log-probability difference of rollout and actor", MISMATCH, None),
    ("tokens per second", THROUGHPUT, max),
    ("seconds per step", STEP_TIME, min),
)


@dataclass(frozen=True)
class Figure:
    """A metric over the whole run: the means over the first and the last tenth of its steps, and
    the best value if it has one."""

    label: str
    first: float
    last: float
    best: float | None


@dataclass(frozen=True)
class PhaseTime:
    """A timed phase of all steps together: its share of the time of all phases, and whether it is a
    part of the phase before it that is none."""

    name: str
    seconds: float
    share: float
    is_part: bool


def figures(rows: Rows) -> list[Figure]:
    """The main metrics that a run has logged."""
    found = []
    for label, metric, best in _SHOWN:
        _, values = series(rows, metric)
        if values:
            first, last = ends(values)
            found.append(Figure(label, first, last, best(values) if best else None))
    return found


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of some values, of at least one."""
    tenth = max(len(values) // 10, 1)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def phase_times(rows: Rows) -> list[PhaseTime]:
    """The timed phases, the longest first, each followed by its parts."""
    prefix = "timing_s/"
    names = {name for _, row in rows for name in row if name.startswith(prefix)}
    spent = {name.removeprefix(prefix): sum(series(rows, name)[1]) for name in names}
    phases = {name: s for name, s in spent.items() if name not in NOT_PHASES}
    total = sum(phases.values())
    if not total:
        return []
    found = []
    for name in sorted(phases, key=lambda name: -phases[name]):
        found.append(PhaseTime(name, phases[name], phases[name] / total, False))
        inner = [part for part in PARTS.get(name, ()) if part in spent]
        found += [PhaseTime(part, spent[part], spent[part] / total, True) for part in inner]
    return found
