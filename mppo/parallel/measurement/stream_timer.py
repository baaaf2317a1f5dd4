"""Times at which the device reaches points of the program, measured without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mppo.parallel import device


class StreamTimer:
    """A clock of the current stream; on the CPU, of the process. A wait for the device would also
    wait for messages that other ranks have not sent yet. On CUDA the times are therefore those of
    events on the stream, which are read when all work is done."""

    def __init__(self) -> None:
        device.synchronize()
        self._origin = self._event() if device.is_cuda() else None
        self._began = time.time()

    def mark(self) -> Callable[[], float]:
        """Return a function that returns the time in seconds since 1970 at which the stream reached
        this point; wait for the device before you call it."""
        if self._origin is None:
            now = time.time()
            return lambda: now
        origin, began, event = self._origin, self._began, self._event()
        return lambda: began + origin.elapsed_time(event) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
