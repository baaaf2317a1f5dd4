"""The numbers of a run, step by step, on disk as metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

Metrics = Mapping[str, float]

# Metric names that the console, the plot and the run report show.
REWARD = "critic/score/mean"
VAL_REWARD = "val/reward"
KL = "objective/kl"
LENGTH = "response_length/mean"
THROUGHPUT = "perf/tokens_per_second"
MISMATCH = "training/rollout_logprob_diff_max"
STEP_TIME = "timing_s/step"


class History:
    """Appends one JSON object per logged step, and remembers them all.

    A run that resumes at step k finds the lines of the interrupted run: those before k are kept,
    those from k on belong to work that was lost, and are dropped when step k is logged.

    Args:
        path: of the file; None keeps the numbers in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._started = False

    def append(self, step: int, metrics: Metrics) -> None:
        """Add a step. A number that is not finite is written as null: JSON has no word for it."""
        if not self._started:
            self._start(step)
        row = {name: float(value) for name, value in metrics.items()}
        self.rows.append((step, row))
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(_line(step, row))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and finite values of one metric."""
        pairs = [
            (step, row[name]) for step, row in self.rows if math.isfinite(row.get(name, math.nan))
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def _start(self, first_step: int) -> None:
        self._started = True
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line that was being written when the run was killed
            step = int(row.pop("step"))
            if step < first_step:
                values = {name: math.nan if value is None else value for name, value in row.items()}
                self.rows.append((step, values))
        rewritten = self.path.with_suffix(".jsonl.tmp")
        rewritten.write_text("".join(_line(step, row) for step, row in self.rows))
        os.replace(rewritten, self.path)


def _line(step: int, row: Metrics) -> str:
    values = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({"step": step, **values}) + "\n"
