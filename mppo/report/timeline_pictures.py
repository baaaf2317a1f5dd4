"""Pictures of updates' timelines: one row per rank, coloured by role and mini-batch.

``python -m mppo.report.timeline_pictures PICTURE TITLE=TRACE...`` draws recorded updates
(``<run>/timeline/step_N.json``) below each other, on one time axis.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mppo.pipeline.timeline import Event, idle_share, read_trace

_PALETTES = ("Blues", "Oranges", "Greens", "Purples")
_STEP = "black"


def draw_timeline(panels: Sequence[tuple[str, Sequence[Sequence[Event]]]], path: Path) -> None:
    """Draw timelines (title, and the events of every rank) below each other, on one time axis in
    seconds, and write them as an image."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = max(len(events) for _, events in panels)
    figure = Figure(figsize=(12, len(panels) * (1 + 0.4 * rows)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (title, events) in zip(axes, panels, strict=True):
        _draw(axis, title, events)
        axis.set_ylabel("rank")
    axes[-1].set_xlabel("seconds")
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)


def _draw(axis, title: str, rows: Sequence[Sequence[Event]]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    origin = min(event.start for row in rows for event in row)
    names = sorted({event.action.role for row in rows for event in row})
    steps = 1 + max(event.action.mini_batch for row in rows for event in row)
    palettes = {name: colormaps[_PALETTES[i % len(_PALETTES)]] for i, name in enumerate(names)}
    for rank, row in enumerate(rows):
        for event in row:
            action, begin = event.action, event.start + event.waited - origin
            if action.kind == "step":
                colour = _STEP
            else:
                colour = palettes[action.role](0.3 + 0.6 * action.mini_batch / max(steps - 1, 1))
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
    legend = [Patch(color=palette(0.6), label=name) for name, palette in palettes.items()]
    axis.legend(
        handles=[*legend, Patch(color=_STEP, label="optimizer step")],
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(legend) + 1, frameon=False, fontsize=8,
    )  # fmt: skip
    axis.set_yticks([-rank for rank in range(len(rows))], [str(rank) for rank in range(len(rows))])
    axis.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw recorded updates below each other, on one time axis in seconds."""
    parser = argparse.ArgumentParser(
        prog="python -m mppo.report.timeline_pictures", description=main.__doc__
    )
    parser.add_argument("picture", type=Path, help="file of the image; its suffix is the format")
    parser.add_argument("traces", nargs="+", metavar="TITLE=TRACE", help="title and step_N.json")
    chosen = parser.parse_args(argv)
    panels = []
    for entry in chosen.traces:
        title, _, trace = entry.partition("=")
        try:
            panels.append((title, read_trace(json.loads(Path(trace).read_text()))))
        except (OSError, ValueError, LookupError, TypeError) as error:
            form = "give TITLE=FILE, with a file that trainer.timeline has written"
            parser.error(f"{entry} cannot be read ({error}): {form}")
    draw_timeline(panels, chosen.picture)


if __name__ == "__main__":
    main()
