"""Console output of a run: live display, a line per step, sample tables."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from mppo.report import history
from mppo.report.history import Metrics
from mppo.safety.foreign_text import valid_text, visible
from mppo.safety.redact import redact
from mppo.supervision.phase import current

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward", history.REWARD, "{:.3f}"),
    ("val reward", history.VAL_REWARD, "{:.3f}"),
    ("kl", history.KL, "{:.4f}"),
    ("length", history.LENGTH, "{:.1f}"),
    ("tokens/s", history.THROUGHPUT, "{:.0f}"),
    ("s/step", history.STEP_TIME, "{:.2f}"),
)
"""Label, metric and format of the numbers in a step's line; absent metrics are left out."""


class SampleRow(NamedTuple):
    """A completion in the table of samples: ``answer`` is the final answer in the response (None:
    nothing reads it), ``place`` "best" or "worst" of the step, or empty."""

    prompt: str
    response: str
    ground_truth: str
    answer: str | None
    score: float
    place: str = ""

    def cells(self) -> tuple[str, ...]:
        texts = (self.prompt, self.response, self.ground_truth, self.answer or "")
        return (*texts, f"{self.score:.3f}", self.place)

    def cleaned(self) -> SampleRow:
        """The row with secrets replaced (a table's narrow columns would cut them into pieces), and
        without halves of surrogate pairs, which no file and no tracker accepts."""
        fields = self._asdict().items()
        texts = {name: valid_text(redact(each)) for name, each in fields if isinstance(each, str)}
        return self._replace(**texts)


SAMPLE_COLUMNS = tuple(name.replace("_", " ") for name in SampleRow._fields)


class StepConsole:
    """A line per step, unless ``quiet``; on a terminal, if ``live``, also a bar below the lines,
    with the current phase and the numbers of the last step. On standard output (``console`` None)
    only a real terminal gets a display and colours, whatever ``FORCE_COLOR`` says: the output may
    be the log of a job."""

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        style: Literal["live", "lines", "quiet"] = "live",
    ) -> None:
        self.total_steps = total_steps
        is_terminal = sys.stdout.isatty()
        self.console = console or Console(highlight=False, force_terminal=is_terminal)
        self._style = style
        self._finished_at: deque[tuple[int, float]] = deque(maxlen=20)
        self._display: _Display | None = None

    def start(self, step: int) -> None:
        """Start timing, with ``step`` steps done."""
        self._finished_at.append((step, time.monotonic()))
        if self.console.is_terminal and self._style == "live":
            self._display = _Display(self.console, self.total_steps, step)

    def step(self, step: int, metrics: Metrics) -> None:
        """Print a step's line and update the display, after ``start``."""
        if step == self._finished_at[-1][0]:  # validation before the first step: not a step's time
            self._finished_at.pop()
        self._finished_at.append((step, time.monotonic()))
        eta = format_duration(self.seconds_left())
        if self._style != "quiet":
            self.print_line(step_line(step, self.total_steps, eta, metrics))
        if self._display is not None:
            self._display.update(step, eta, metrics)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Print a table of completions."""
        if self._style == "quiet":
            return
        table = Table(title=f"step {step}: samples", title_justify="left")
        for name in SAMPLE_COLUMNS:
            table.add_column(name, overflow="fold", justify="right" if name == "score" else "left")
        for row in rows:
            table.add_row(*(Text(visible(text)) for text in row.cells()))
        self.console.print(table)

    def warnings(self, texts: Sequence[str]) -> None:
        """Show the ongoing warnings on top of the display; an empty list removes them."""
        if self._display is not None:
            self._display.warn(texts)

    def print_line(self, line: str) -> None:
        """Print a line without wrapping or markup, and with escapes for control characters: names
        of data sources and errors stand in it, and a terminal would execute them."""
        self.console.print(Text(visible(line)), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Estimated seconds to the end, from the last steps; None before the first step is done."""
        (first, began), (last, ended) = self._finished_at[0], self._finished_at[-1]
        if last == first:
            return None
        return (ended - began) / (last - first) * (self.total_steps - last)

    def stop(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None


class _PhaseColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(current().split(" > ")[-1].split(", step ")[0])


class _Display:
    """What stands below the lines of a terminal: ongoing warnings, bar, phase, ETA, and the last
    step's numbers."""

    def __init__(self, console: Console, total_steps: int, step: int) -> None:
        self._bar = Progress(
            TextColumn("[bold]PPO"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("eta {task.fields[eta]}"),
            TimeElapsedColumn(),
            _PhaseColumn(),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=total_steps, completed=step, eta="?")
        self._warnings: list[Text] = []
        self._numbers = Table.grid(padding=(0, 2))
        self._live = Live(self._bar, console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def update(self, step: int, eta: str, metrics: Metrics) -> None:
        self._bar.update(self._task, completed=step, eta=eta)
        numbers = Table.grid(padding=(0, 2))
        shown = [(label, form.format(metrics[key])) for label, key, form in SHOWN if key in metrics]
        numbers.add_row(*(Text(label, style="dim") for label, _ in shown))
        numbers.add_row(*(value for _, value in shown))
        self._numbers = numbers
        self._show()

    def warn(self, texts: Sequence[str]) -> None:
        """Show these warnings instead of the earlier ones."""
        self._warnings = [Text(f"warning: {visible(text)}", style="yellow") for text in texts]
        self._show()

    def _show(self) -> None:
        self._live.update(Group(*self._warnings, self._bar, self._numbers))

    def stop(self) -> None:
        self._live.stop()


def step_line(step: int, total_steps: int, eta: str, metrics: Metrics) -> str:
    """Such as ``step  12/100 | eta 1m05s | reward 0.512 | kl 0.0123 | length 4.2``."""
    width = len(str(total_steps))
    parts = [f"step {step:{width}d}/{total_steps}", f"eta {eta}"]
    parts += [
        f"{label} {form.format(metrics[key])}" for label, key, form in SHOWN if key in metrics
    ]
    return " | ".join(parts)


def format_duration(seconds: float | None) -> str:
    """A duration such as ``45s``, ``3m07s``, ``2h05m``; ``?`` for None."""
    if seconds is None:
        return "?"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
