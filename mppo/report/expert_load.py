"""A plot of the load of each layer's experts over a run."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mppo.report.history import History
from mppo.safety.disk import replacing

_LABELS = 16
"""About as many layers have a label."""
_METRIC = re.compile(r"(\w+)/moe/layer_(\d+)/max_vio")


def load_rows(runs: History) -> dict[str, tuple[list[int], dict[int, list[float]]]]:
    """By role: the steps, and by layer the load of the fullest expert at each step, relative to an
    even load: 1 is even, 2 is twice as much."""
    names = sorted({name for _, row in runs.rows for name in row})
    roles: dict[str, tuple[list[int], dict[int, list[float]]]] = {}
    for name in names:
        match = _METRIC.fullmatch(name)
        if match is None:
            continue
        role, layer = match.groups()
        steps, values = runs.series(name)
        roles.setdefault(role, (steps, {}))[1][int(layer)] = [1 + value for value in values]
    return roles


def plot_expert_load(runs: History, path: Path, title: str) -> bool:
    """Write a PNG with one heat map per role, layers over steps; False for a run without
    experts."""
    # only the rank that draws imports matplotlib: it takes half a second
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    roles = load_rows(runs)
    if not roles:
        return False
    figure = Figure(figsize=(8, 3 * len(roles)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: load of the fullest expert, relative to an even load")
    for axis, (role, (steps, layers)) in zip(
        figure.subplots(len(roles), squeeze=False)[:, 0], roles.items()
    ):
        order = sorted(layers)
        image = axis.imshow(
            [layers[layer] for layer in order],
            aspect="auto",
            vmin=1,
            interpolation="nearest",
            extent=(steps[0] - 0.5, steps[-1] + 0.5, len(order) - 0.5, -0.5),
        )
        every = math.ceil(len(order) / _LABELS)
        axis.set_yticks(range(0, len(order), every), [str(layer) for layer in order[::every]])
        axis.set_ylabel(f"{role}: layer")
        axis.set_xlabel("step")
        figure.colorbar(image, ax=axis)
    with replacing(path) as building:
        figure.savefig(building, dpi=120, metadata={"Software": None})
    return True
