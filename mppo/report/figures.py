"""A run's main numbers, for both reports: first, last and best values, and seconds by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mppo.report import history

Rows = Sequence[tuple[int, Mapping[str, float]]]

SHARE = 10
"""The first and last values of a metric are means over a tenth (1 / SHARE) of the run."""
_SHOWN: tuple[tuple[str, str, Callable[[Sequence[float]], float] | None], ...] = (
    ("mean reward", history.REWARD, max),
    ("validation reward", history.VAL_REWARD, max),
    ("KL to the reference, nats per response", history.KL, None),
    ("response length, tokens", history.LENGTH, None),
    ("largest log-probability difference of rollout and actor", history.MISMATCH, None),
    ("tokens per second", history.THROUGHPUT, max),
    ("seconds per step", history.STEP_TIME, min),
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
    """A timed phase of all steps together.

    Args:
        share: of the time of all phases.
        is_part: whether it is a part of the phase before it that is none.
    """

    name: str
    seconds: float
    share: float
    is_part: bool


def figures(rows: Rows) -> list[Figure]:
    """The main metrics that a run has logged."""
    found = []
    for label, metric, best in _SHOWN:
        _, values = history.series(rows, metric)
        if values:
            first, last = ends(values)
            found.append(Figure(label, first, last, best(values) if best else None))
    return found


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of some values, of at least one."""
    tenth = max(len(values) // SHARE, 1)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def phase_times(rows: Rows) -> list[PhaseTime]:
    """The timed phases, the longest first, each followed by its parts."""
    prefix = "timing_s/"
    names = {name for _, row in rows for name in row if name.startswith(prefix)}
    spent = {name.removeprefix(prefix): sum(history.series(rows, name)[1]) for name in names}
    phases = {name: s for name, s in spent.items() if name not in history.NOT_PHASES}
    total = sum(phases.values())
    if not total:
        return []
    found = []
    for name in sorted(phases, key=lambda name: -phases[name]):
        found.append(PhaseTime(name, phases[name], phases[name] / total, False))
        inner = [part for part in history.PARTS.get(name, ()) if part in spent]
        found += [PhaseTime(part, spent[part], spent[part] / total, True) for part in inner]
    return found
