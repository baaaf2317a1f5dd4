"""Background saves that copy the models as late as training lets them.

A copy begins only when somebody waits for the save, or when the models have changed. Where training
waits before it changes them, the save is right all the same; where it does not, the save is wrong
every time, not once in a while.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from torch import Tensor

from mppo.checkpoint.checkpointer import Checkpointer
from mppo.checkpoint.staging import HostBuffers
from mppo.checkpoint.writer import SaveJob, SaveThread
from mppo.trainer.run import Run
from mppo.trainer.update_phase import UpdatePhase


class _LateBuffers(HostBuffers):
    def __init__(self, begin: threading.Event) -> None:
        super().__init__()
        self._begin = begin

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        self._begin.wait()
        return super().copy(key, tensor)


class _AwaitedThread(SaveThread):
    """Lets the copies begin where it is waited for."""

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


def late(saver: Checkpointer) -> threading.Event:
    """Have a checkpointer copy late; the event is to be set once the models have changed."""
    begin = threading.Event()
    saver._buffers, saver._thread = _LateBuffers(begin), _AwaitedThread(begin)
    return begin


def late_in_loop(run: Run) -> None:
    """The same for the run of this process: its updates change the models."""
    changed, metrics = late(run.checkpoints), UpdatePhase.metrics

    def metrics_once_changed(phase: UpdatePhase) -> dict[str, float]:
        found = metrics(phase)
        changed.set()
        return found

    UpdatePhase.metrics = metrics_once_changed
