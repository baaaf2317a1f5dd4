"""What a person sees while a run goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mppo.report import history
from mppo.report.history import Metrics

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward", history.REWARD, "{:.3f}"),
    ("val reward", history.VAL_REWARD, "{:.3f}"),
    ("kl", history.KL, "{:.4f}"),
    ("length", history.LENGTH, "{:.1f}"),
    ("tokens/s", history.THROUGHPUT, "{:.0f}"),
    ("s/step", history.STEP_TIME, "{:.2f}"),
)
"""Label, metric and format of the numbers on a step's line; absent metrics are left out."""


class SampleRow(NamedTuple):
    """A completion, for the table.

    Args:
        prompt: as text.
        response: as text.
        ground_truth: what the response was compared with.
        score: outcome reward.
    """

    prompt: str
    response: str
    ground_truth: str
    score: float


SAMPLE_COLUMNS = tuple(name.replace("_", " ") for name in SampleRow._fields)


class StepConsole:
    """A progress bar where the output is a terminal; one readable line per step everywhere.

    Args:
        total_steps: length of the run.
        console: where to print; standard output by default.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self._finished_at: deque[tuple[int, float]] = deque(maxlen=20)
        self._progress: Progress | None = None

    def start(self, step: int) -> None:
        """Begin timing at ``step`` steps done."""
        self._finished_at.append((step, time.monotonic()))
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]PPO"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("eta {task.fields[eta]}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._progress.add_task("steps", total=self.total_steps, completed=step, eta="?")
            self._progress.start()

    def step(self, step: int, metrics: Metrics) -> None:
        """Print a step's line and move the bar. ``start`` comes before."""
        if step == self._finished_at[-1][0]:  # validation before the first step: no step's time
            self._finished_at.pop()
        self._finished_at.append((step, time.monotonic()))
        eta = format_duration(self.seconds_left())
        self.print_line(step_line(step, self.total_steps, eta, metrics))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, eta=eta)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Print a table of completions."""
        table = Table(title=f"step {step}: samples", title_justify="left")
        for name in SAMPLE_COLUMNS:
            table.add_column(name, overflow="fold", justify="right" if name == "score" else "left")
        for *texts, score in rows:
            table.add_row(*(Text(visible(text)) for text in texts), f"{score:.3f}")
        self.console.print(table)

    def print_line(self, line: str) -> None:
        """Print a line as it is: no wrapping, no markup."""
        self.console.print(Text(line), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Estimate from the last steps; None before one is done."""
        (first, began), (last, ended) = self._finished_at[0], self._finished_at[-1]
        if last == first:
            return None
        return (ended - began) / (last - first) * (self.total_steps - last)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def step_line(step: int, total_steps: int, eta: str, metrics: Metrics) -> str:
    """Such as ``step  12/100 | eta 1m05s | reward 0.512 | kl 0.0123 | length 4.2``."""
    width = len(str(total_steps))
    parts = [f"step {step:{width}d}/{total_steps}", f"eta {eta}"]
    parts += [
        f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics
    ]
    return " | ".join(parts)


def format_duration(seconds: float | None) -> str:
    """Such as ``45s``, ``3m07s``, ``2h05m``; ``?`` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def visible(text: str) -> str:
    """Text on one line, line breaks and unprintable characters written as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
