"""Lines (label, steps and values) and heat maps of numbers that grow with ranks, layers and steps,
made small."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from mppo.report import history
from mppo.report.history import Rows

Line = tuple[str, list[int], list[float]]

EACH_RANK = 16
"""Most ranks with a line each."""
WORST = 4
"""Ranks with a line where there are more."""
COLUMNS = 500
"""Most columns of a heat map."""


def rank_lines(rows: Rows, prefix: str) -> list[Line]:
    """The lines of a metric of each rank, given without the rank, such as ``history.MEMORY``.

    Of more than ``EACH_RANK`` ranks these are the smallest, the median and the largest number of
    each step, and the ``WORST`` ranks: those that are the most above the median, over all steps.
    """
    ranks = {name for _, row in rows for name in row if name.startswith(prefix)}
    made_of_all = {f"{prefix}{part}" for part in history.OF_RANKS}
    # few ranks in the rows may be the highest of many, each time the same
    each = len(ranks - made_of_all) <= EACH_RANK and not ranks & made_of_all
    ranks -= made_of_all
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    above: dict[str, float] = defaultdict(float)
    for step, row in rows:
        found = {name: v for name, v in row.items() if name in ranks and math.isfinite(v)}
        if not found:
            continue
        for name, value in found.items():
            lines[name].append((step, value))
        if each:
            continue
        values = found.values()
        made = {"min": min(values), "median": median(values), "max": max(values)}
        for part in history.OF_RANKS:  # of all ranks, where the row has only the worst
            made[part] = row.get(f"{prefix}{part}", made[part])
            lines[part].append((step, made[part]))
        for name, value in found.items():
            above[name] += value / made["median"] - 1 if made["median"] > 0 else 0.0
    if each:
        shown = sorted(ranks & lines.keys(), key=by_number)
    else:
        worst = sorted(above, key=lambda name: above[name])[-WORST:]
        shown = [*(part for part in history.OF_RANKS if part in lines), *reversed(worst)]
    return [
        (
            name if name in history.OF_RANKS else f"rank {name.removeprefix(prefix)}",
            [step for step, _ in lines[name]],
            [value for _, value in lines[name]],
        )
        for name in shown
    ]


def by_number(label: str) -> list[Any]:
    """Sort key under which ``rank 10`` comes after ``rank 9``."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", label)]


def column_width(steps: Sequence[int]) -> int:
    return max(math.ceil(len(steps) / COLUMNS), 1)


def in_columns(
    steps: Sequence[int], values: Sequence[float | None], width: int
) -> tuple[list[int], list[float | None]]:
    """The first step and the largest value (None: there is none) of each column of a heat map."""
    columns = range(0, len(steps), width)
    parts = [[v for v in values[i : i + width] if v is not None] for i in columns]
    return [steps[i] for i in columns], [max(part, default=None) for part in parts]


def rounded(values: Sequence[float]) -> list[float | None]:
    """Five significant digits; None for what is not finite, which JSON cannot hold."""
    found = [float(f"{v:.5g}") for v in values]  # the largest numbers round to infinity
    return [v if math.isfinite(v) else None for v in found]
