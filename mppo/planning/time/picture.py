"""Drawing of a predicted step: a bar for each group of ranks, phase after phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mppo.planning.time.step import Phase, Prediction, Spent

COLOURS = {
    "compute": "#1f77b4",
    "memory": "#2ca02c",
    "network": "#ff7f0e",
    "host": "#9467bd",
    "idle pipeline": "#d9d9d9",
    "tail of generation": "#bcbd22",
    "agents": "#8c564b",
    "disk": "#7f7f7f",
}
SERVERS = "servers"
_LABELLED = 0.04
"""Share of the step from which a phase has its name above it."""


@dataclass(frozen=True)
class GroupBar:
    """A phase of a group of ranks; ``start`` is in seconds."""

    group: int
    phase: Phase
    start: float
    spent: Spent


def rank_groups(prediction: Prediction, world: int) -> list[str]:
    """Names of the groups: pipeline stages of the ranks, and servers on GPUs of their own."""
    stages = max([1, *(len(phase.stages) for phase in prediction.phases)])
    each = world // stages
    names = [f"ranks {stage * each} to {(stage + 1) * each - 1}" for stage in range(stages)]
    return [*names, SERVERS] if prediction.gpus > world else names


def group_bars(prediction: Prediction, world: int) -> Iterator[GroupBar]:
    groups, elsewhere = len(rank_groups(prediction, world)), prediction.gpus > world
    ranks = groups - elsewhere
    start = 0.0
    for phase in prediction.phases:
        if phase.name == "generation" and elsewhere:
            yield GroupBar(ranks, phase, 0.0, phase.spent)
            start = 0.0 if prediction.overlapped else phase.seconds
            continue
        for group in range(ranks):
            # stages of a shorter pipeline have several of the groups
            own = phase.stages[group * len(phase.stages) // ranks] if phase.stages else phase.spent
            yield GroupBar(group, phase, start, own)
        start += phase.seconds


def draw_step(title: str, prediction: Prediction, world: int, path: Path) -> None:
    """Draw a step from left to right, a row for each group of ranks."""
    matplotlib: Any = import_module("matplotlib")  # imported only to draw; its types are partial
    figures: Any = import_module("matplotlib.figure")

    groups = rank_groups(prediction, world)
    figure = figures.Figure(figsize=(12, 1.9 + 0.5 * len(groups)), layout="constrained")
    axis = figure.subplots()
    shown: set[str] = set()
    phases = list(prediction.phases)
    for bar in group_bars(prediction, world):
        left = bar.start
        for kind, seconds in bar.spent.items():
            if seconds:
                axis.barh(-bar.group, seconds, left=left, color=COLOURS[kind], height=0.7)
                shown.add(kind)
            left += seconds
        axis.barh(-bar.group, bar.phase.seconds, left=bar.start, color="none",
                  edgecolor="black", linewidth=0.8, height=0.7)  # fmt: skip
        named = bar.group == 0 or groups[bar.group] == SERVERS
        if named and bar.phase.seconds >= _LABELLED * prediction.seconds:
            height = 0.38 - bar.group + 0.24 * (bar.group == 0) * (phases.index(bar.phase) % 3)
            axis.text(bar.start, height, f"{bar.phase.name} {bar.phase.seconds:.1f} s",
                      fontsize=7, va="bottom")  # fmt: skip
    axis.set_ylim(0.55 - len(groups), 1.2)
    axis.set_xlim(0, prediction.seconds)
    axis.set_yticks([-row for row in range(len(groups))], groups)
    axis.set_xlabel(f"predicted seconds of a step; {prediction.source}", fontsize=8)
    axis.set_title(title, fontsize=9, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    _legend(axis, [kind for kind in COLOURS if kind in shown])
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)


def _legend(axis: Any, kinds: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.3),
                ncols=6, frameon=False, fontsize=8)  # fmt: skip
