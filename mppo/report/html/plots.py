"""Which metrics the plots of the HTML report show, and the searchable list of all metrics."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mppo.report import history
from mppo.report.html.reduced import by_number, column_width, in_columns, rank_lines, rounded
from mppo.report.html.run_data import RunData

Kind = Literal["lines", "ranks", "stack", "heat"]


@dataclass(frozen=True)
class PlotSpec:
    """A plot; ``unit`` is what the vertical axis shows. ``metrics`` are label and metric of each
    line; a metric is a regular expression, and its group, if it has one, is the label. ``kind``:
    lines of all runs in one plot, these of a metric of each rank (its prefix), or a stacked area or
    a heat map per run."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    kind: Kind = "lines"
    hides_zeros: bool = False


_MIS = "training/rollout_logprob_diff"
SPECS: tuple[PlotSpec, ...] = (
    PlotSpec("Reward", "mean", (("training", history.REWARD), ("validation", history.VAL_REWARD))),
    PlotSpec("Validation by source", "mean reward", (("", r"val-core/(.+)/reward/mean"),)),
    PlotSpec("Validation: other numbers", "", (
        ("", r"val-core/(.+/(?!reward/mean$)[^/]+/[^/]+)"),
    )),
    PlotSpec("Numbers of the reward function", "mean", (("", r"reward/(.+)/mean"),)),
    PlotSpec("Turns of a conversation", "", (("", r"conversation/turns/(mean|max)"),)),
    PlotSpec("Responses without a score", "in a step", (
        ("", r"reward/(errors|failures|timeouts|bad_verdicts)"),
    ), hides_zeros=True),
    PlotSpec("KL to the reference", "nats per response", (("", history.KL),)),
    PlotSpec("KL per token, and its coefficient", "nats", (
        ("KL", "actor/reward_kl_penalty"), ("coefficient", "actor/reward_kl_penalty_coeff"),
    )),
    PlotSpec("Entropy", "nats per token", (("", "policy/entropy_avg"),)),
    PlotSpec("Response length", "tokens", (
        ("mean", history.LENGTH), ("longest", "response_length/max"),
    )),
    PlotSpec("Cut off, and groups of one score", "fraction", (
        ("cut off", "response_length/clip_ratio"), ("equal groups", "critic/score/equal_groups"),
    )),
    PlotSpec("Clipped", "fraction of tokens", (
        ("policy", "actor/pg_clipfrac"), ("policy, lower", "actor/pg_clipfrac_lower"),
        ("value", "critic/vf_clipfrac"),
    )),
    PlotSpec("Explained variance", "fraction", (
        ("", "critic/vf_explained_var"), ("age ", r"critic/vf_explained_var_by_age/(\d+)"),
    )),
    PlotSpec("Mismatch of rollout and actor", "nats", (
        ("mean", f"{_MIS}_mean"), ("largest", f"{_MIS}_max"), ("KL", "rollout_corr/kl"),
    )),
    PlotSpec("Losses", "", (
        ("policy", "actor/pg_loss"), ("value", "critic/vf_loss"),
        ("value, first epoch", "critic/vf_loss_first"),
        ("value, last epoch", "critic/vf_loss_last"),
    )),
    PlotSpec("Gradient norms", "", (
        ("actor", "actor/grad_norm"), ("critic", "critic/grad_norm"),
    )),
    PlotSpec("Learning rates", "", (("actor", "actor/lr"), ("critic", "critic/lr"))),
    PlotSpec("Time per phase", "seconds", (("", r"timing_s/(.+)"),), "stack"),
    PlotSpec("Throughput", "tokens per second", (("", history.THROUGHPUT),)),
    PlotSpec("Memory per rank", "GiB, peak", (("", history.MEMORY),), "ranks"),
    PlotSpec("Speed of the ranks", "ms for one product", (("", history.PROBE),), "ranks"),
    PlotSpec("Skipped steps", "in all", (("", "training/skipped_steps"),), hides_zeros=True),
    PlotSpec("Load of the fullest expert", "layer", (("", r"(.+/moe/layer_\d+)/max_vio"),), "heat"),
)  # fmt: skip


def plots_of(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The plots that have points, as plain values.

    A line has ``run`` (its index), ``label``, ``y``, and ``x`` if it lacks some ``trained_steps``.
    """
    steps = [trained_steps(run) for run in runs]
    names = [sorted({name for _, row in run.rows for name in row}) for run in runs]
    plots = []
    for number, spec in enumerate(SPECS):
        width = column_width(max(steps, key=len, default=[])) if spec.kind == "heat" else 1
        lines = [
            {"run": place, "label": label, "y": y} | ({} if x == steps[place] else {"x": x})
            for place, run in enumerate(runs)
            for label, x, y in _drawn(spec, run, names[place], width)
            if x
        ]
        groups, together = [lines], spec.kind in ("lines", "ranks")
        if not together:
            groups = [[line for line in lines if line["run"] == i] for i in range(len(runs))]
        for group in filter(None, groups):
            place = "" if together else f"-{group[0]['run']}"
            plots.append(
                {
                    "id": f"plot-{number}{place}",
                    "title": spec.title,
                    "unit": spec.unit + (f", largest of {width} steps" if width > 1 else ""),
                    "kind": "lines" if together else spec.kind,
                    "lines": group,
                }
            )
    return plots


def _drawn(
    spec: PlotSpec, run: RunData, names: Sequence[str], width: int
) -> Iterator[tuple[str, list[int], list[float | None]]]:
    """Label, steps and values of each line of a run."""
    if spec.kind == "ranks":
        for _, prefix in spec.metrics:
            for label, x, y in rank_lines(run.rows, prefix):
                yield label, x, rounded(y)
        return
    for label, metric in _lines(spec, names):
        x, values = history.series(run.rows, metric)
        y = rounded(values)
        if spec.hides_zeros and not any(y):
            continue
        if width > 1:
            x, y = in_columns(x, y, width)
        yield label, x, y


def trained_steps(run: RunData) -> list[int]:
    return [step for step, _ in run.rows if step > 0]


def _lines(spec: PlotSpec, names: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for label, pattern in spec.metrics:
        for name in names:
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            part = match[1] if match.lastindex else ""
            if spec.kind == "stack" and part in history.NOT_PHASES:
                continue
            found.append((label + part, name))
    return sorted(found, key=lambda line: by_number(line[0])) if len(found) > 3 else found


POINTS = 200
"""Most points of a metric's plot: of more, evenly spaced steps are shown, among them the last."""


def metric_list(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Every metric, by name: its numbers in each run, and points of its plot.

    ``runs`` of a metric has for each run None, or number of values, first, last, smallest and
    largest value, and the points' ``x`` and ``y``. Values that are not finite are left out.
    """
    found = [_series(run) for run in runs]
    names = sorted({name for each in found for name in each})
    return [{"name": name, "runs": [_numbers(each.get(name)) for each in found]} for name in names]


def _series(run: RunData) -> dict[str, tuple[list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for step, row in run.rows:
        for name, value in row.items():
            if math.isfinite(value):
                steps, values = found[name]
                steps.append(step)
                values.append(value)
    return found


def _numbers(series: tuple[list[int], list[float]] | None) -> dict[str, Any] | None:
    if series is None:
        return None
    steps, values = series
    places = history.evenly_spaced(len(steps), POINTS)
    return {
        "count": len(steps),
        "numbers": rounded([values[0], values[-1], min(values), max(values)]),
        "x": [steps[place] for place in places],
        "y": rounded([values[place] for place in places]),
    }
