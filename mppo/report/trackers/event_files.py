"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mppo.report.console import SampleRow
from mppo.report.history import Metrics
from mppo.report.summary import markdown_table
from mppo.report.trackers.tracker import SAMPLES, TrackedRun, import_tracker


class TensorBoard:
    """Event files under ``<run>/tensorboard``; a resumed run replaces the steps it repeats."""

    def __init__(self, run: TrackedRun) -> None:
        module = import_tracker("tensorboard")
        purge = run.done + 1 if run.done else None
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text(
            SAMPLES, "\n".join(markdown_table([row.cells() for row in rows])), step
        )

    def picture(self, step: int, path: Path) -> None:
        from matplotlib.image import imread  # takes half a second, of which other ranks need none

        pixels_HWC = (imread(path) * 255).astype("uint8")  # of a PNG, from 0 to 1
        self._writer.add_image(path.stem, pixels_HWC, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()
