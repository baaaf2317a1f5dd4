"""Plots of a whole run: reward and KL, the load of the experts, the calibration of the critic."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mppo.report import history
from mppo.report.history import History
from mppo.safety.disk import replacing

# matplotlib is imported inside functions: it takes half a second, and only one rank draws

_LABELS = 16
"""About as many layers have a label."""
_MAX_VIO = re.compile(r"(\w+)/moe/layer_(\d+)/max_vio")
_VALUE, _RETURN = "critic/calibration/value/", "critic/calibration/return/"
_CALIBRATED_STEPS = 4
"""Steps that are drawn: the first, the last, and others at equal distances between them."""


def plot_run(runs: History, path: Path, title: str) -> None:
    """Write a PNG with training and validation reward above, and the KL to the reference below."""
    figure = _figure(title, 8, 6)
    reward_axis, kl_axis = figure.subplots(2, 1, sharex=True)
    steps, rewards = runs.series(history.REWARD)
    reward_axis.plot(steps, rewards, color="tab:blue", linewidth=1, label="training")
    val_steps, val_rewards = runs.series(history.VAL_REWARD)
    if val_steps:
        reward_axis.plot(val_steps, val_rewards, "o-", color="tab:orange", label="validation")
    if steps or val_steps:
        reward_axis.legend()
    reward_axis.set_ylabel("mean reward")
    kl_axis.plot(*runs.series(history.KL), color="tab:green", linewidth=1)
    kl_axis.set_ylabel("KL to the reference\n(nats per response)")
    kl_axis.set_xlabel("step")
    for axis in (reward_axis, kl_axis):
        axis.grid(alpha=0.3)
    _save(figure, path)


def load_rows(runs: History) -> dict[str, tuple[list[int], dict[int, list[float]]]]:
    """By role: the steps, and by layer the load of the fullest expert at each step, relative to an
    even load: 1 is even, 2 is twice as much."""
    roles: dict[str, tuple[list[int], dict[int, list[float]]]] = {}
    for name in sorted({name for _, row in runs.rows for name in row}):
        if match := _MAX_VIO.fullmatch(name):
            role, layer = match.groups()
            steps, values = runs.series(name)
            roles.setdefault(role, (steps, {}))[1][int(layer)] = [1 + value for value in values]
    return roles


def plot_expert_load(runs: History, path: Path, title: str) -> None:
    """Write a PNG with one heat map per role, layers over steps; nothing for a run
    without experts."""
    roles = load_rows(runs)
    if not roles:
        return
    title = f"{title}: load of the fullest expert, relative to an even load"
    figure = _figure(title, 8, 3 * len(roles))
    axes = figure.subplots(len(roles), squeeze=False)[:, 0]
    for axis, (role, (steps, layers)) in zip(axes, roles.items()):
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
    _save(figure, path)


def calibration_lines(runs: History) -> list[tuple[int, list[float], list[float]]]:
    """Steps at equal distances with the mean values and mean returns of their groups of tokens."""
    found: list[tuple[int, list[float], list[float]]] = []
    for step, row in runs.rows:
        groups = sorted(int(name.removeprefix(_VALUE)) for name in row if name.startswith(_VALUE))
        if groups:
            values = [row[f"{_VALUE}{group}"] for group in groups]
            found.append((step, values, [row[f"{_RETURN}{group}"] for group in groups]))
    return [found[i] for i in history.evenly_spaced(len(found), _CALIBRATED_STEPS)]


def plot_calibration(runs: History, path: Path, title: str) -> None:
    """Write a PNG with a line per step; a calibrated critic's is the diagonal. Nothing for a
    run without a critic."""
    lines = calibration_lines(runs)
    if not lines:
        return
    figure = _figure(f"{title}: calibration of the critic", 6, 5)
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
    _save(figure, path)


def _figure(title: str, width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _save(figure, path: Path) -> None:
    with replacing(path) as building:
        figure.savefig(building, dpi=120, metadata={"Software": None})
