"""Background saves whose copies of the models start as late as training allows.

A copy starts only when training waits for the save, or after the models have changed. If training
waits before it changes the models, the save is correct; if it does not, the save is wrong every
time instead of rarely.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from torch import Tensor

from mppo.checkpoint.checkpointer import Checkpointer
from mppo.checkpoint.writer import HostBuffers, SaveJob, SaveThread
from mppo.trainer.run import Run
from mppo.trainer.update.update_stage import UpdatePhase


class _DelayedBuffers(HostBuffers):
    def __init__(self, begin: threading.Event) -> None:
        super().__init__()
        self._begin = begin

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        self._begin.wait()
        return super().copy(key, tensor)


class _DelayedSaveThread(SaveThread):
    """Starts the copies when somebody waits for them."""

    def __init__(self, begin: threading.Event) -> None:
        super().__init__()
        self._begin = begin

    def start(self, job: SaveJob) -> None:
        self._begin.clear()
        super().start(job)

    def wait_copied(self) -> None:
        self._begin.set()
        super().wait_copied()

    def wait(self) -> SaveJob | None:
        self._begin.set()
        return super().wait()


def delay_copies(saver: Checkpointer) -> threading.Event:
    """Delay a checkpointer's copies.

    Returns:
        The event to set once the models have changed; it starts the copies.
    """
    begin = threading.Event()
    saver._buffers, saver._thread = _DelayedBuffers(begin), _DelayedSaveThread(begin)
    return begin


def delay_copies_in_loop(run: Run) -> None:
    """Delay the copies of the run of this process until an update has changed the models."""
    changed, metrics = delay_copies(run.checkpoints), UpdatePhase.metrics

    def metrics_once_changed(phase: UpdatePhase) -> dict[str, float]:
        found = metrics(phase)
        changed.set()
        return found

    UpdatePhase.metrics = metrics_once_changed
