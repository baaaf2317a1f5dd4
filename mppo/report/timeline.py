"""Drawing of an update's timeline: one row per rank, coloured by role and mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mppo.pipeline.timeline import Event, idle_share

_PALETTES = ("Blues", "Oranges", "Greens", "Purples")
_STEP = "black"


def draw_timeline(panels: Sequence[tuple[str, str, Sequence[Sequence[Event]]]], path: Path) -> None:
    """Draw timelines below each other and write them as an image.

    Args:
        panels: for each timeline its title, the name of a row ("rank", "stage") and the events of
            every row.
        path: file of the image; its suffix selects the format.
    """
    from matplotlib.figure import Figure

    rows = max(len(events) for *_, events in panels)
    figure = Figure(figsize=(12, len(panels) * (1 + 0.4 * rows)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, unit, events) in zip(axes, panels, strict=True):
        _draw(axis, title, events)
        axis.set_ylabel(unit)
    figure.savefig(path, dpi=150)


def _draw(axis, title: str, rows: Sequence[Sequence[Event]]) -> None:
    from matplotlib import colormaps

    origin = min(event.start for row in rows for event in row)
    names = sorted({event.action.role for row in rows for event in row})
    steps = 1 + max(event.action.mini_batch for row in rows for event in row)
    for rank, row in enumerate(rows):
        for event in row:
            action, begin = event.action, event.start + event.waited - origin
            if action.kind == "step":
                colour = _STEP
            else:
                palette = colormaps[_PALETTES[names.index(action.role) % len(_PALETTES)]]
                colour = palette(0.3 + 0.6 * action.mini_batch / max(steps - 1, 1))
            axis.barh(
                -rank,
                event.end - origin - begin,
                left=begin,
                height=0.8 if action.kind == "backward" else 0.5,
                color=colour,
                edgecolor="white",
                linewidth=0.3,
            )
    axis.set_title(f"{title}: {idle_share(rows):.0%} idle", fontsize=9, loc="left")
    axis.set_yticks([-rank for rank in range(len(rows))], [str(rank) for rank in range(len(rows))])
    axis.spines[["top", "right"]].set_visible(False)
