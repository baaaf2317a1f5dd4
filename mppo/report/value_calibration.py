"""A plot of the critic's calibration: predicted values against returns, at a few steps of a run."""

from __future__ import annotations

from pathlib import Path

from mppo.report.history import History
from mppo.safety.disk import replacing

_VALUE, _RETURN = "critic/calibration/value/", "critic/calibration/return/"
_SHOWN = 4
"""Steps that are drawn: the first, the last, and others at equal distances between them."""


def calibration_lines(runs: History) -> list[tuple[int, list[float], list[float]]]:
    """Steps at equal distances with the mean values and mean returns of their groups of tokens."""
    found: list[tuple[int, list[float], list[float]]] = []
    for step, row in runs.rows:
        groups = sorted(int(name.removeprefix(_VALUE)) for name in row if name.startswith(_VALUE))
        if groups:
            values = [row[f"{_VALUE}{group}"] for group in groups]
            found.append((step, values, [row[f"{_RETURN}{group}"] for group in groups]))
    last = len(found) - 1
    chosen = sorted({round(i * last / (_SHOWN - 1)) for i in range(_SHOWN)}) if found else []
    return [found[i] for i in chosen]


def plot_calibration(runs: History, path: Path, title: str) -> bool:
    """Write a PNG with a line per step; a calibrated critic's is the diagonal. False for a run
    without a critic."""
    # only the rank that draws imports matplotlib: it takes half a second
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = calibration_lines(runs)
    if not lines:
        return False
    figure = Figure(figsize=(6, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: calibration of the critic")
    axis = figure.subplots()
    numbers = [x for _, values, returns in lines for x in (*values, *returns)]
    ends = (min(numbers), max(numbers))
    axis.plot(ends, ends, color="gray", linewidth=1, linestyle="--", label="calibrated")
    for place, (step, values, returns) in enumerate(lines):
        shade = 1.0 if len(lines) == 1 else 0.3 + 0.7 * place / (len(lines) - 1)
        axis.plot(values, returns, "o-", color="tab:blue", alpha=shade, label=f"step {step}")
    axis.set_xlabel("mean value of a tenth of the tokens")
    axis.set_ylabel("their mean return")
    axis.grid(alpha=0.3)
    axis.legend()
    with replacing(path) as building:
        figure.savefig(building, dpi=120, metadata={"Software": None})
    return True
