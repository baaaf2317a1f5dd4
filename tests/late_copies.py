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
from mppo.run import Run


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
    """The same for a whole run: its updates change the models."""
    changed, update = late(run.checkpoints), run.roles.update

    def update_and_tell(*arguments) -> dict[str, float]:
        metrics = update(*arguments)
        changed.set()
        return metrics

    run.roles.update = update_and_tell
