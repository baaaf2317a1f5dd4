"""All metrics of the runs, for the searchable list of the page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mppo.report.html.reduced import rounded
from mppo.report.html.run_data import RunData

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
    last = len(steps) - 1
    count = min(POINTS, len(steps))
    places = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})
    return {
        "count": len(steps),
        "numbers": rounded([values[0], values[-1], min(values), max(values)]),
        "x": [steps[place] for place in places],
        "y": rounded([values[place] for place in places]),
    }
