"""The peak of a GPU's memory in each phase of a run, as the simulation has it."""

from __future__ import annotations

from typing import Any

import torch

from mppo.parallel import device
from mppo.supervision import phase


class PhasePeaks:
    """Measures inside ``with``; the allocator's own peak is reset whenever a phase begins or ends.

    Attributes:
        gib: largest number of allocated GiB by name of the innermost phase; on a CPU empty.
    """

    def __init__(self) -> None:
        self.gib: dict[str, float] = {}
        self._inside, self._tick = "start", phase.tick

    def _changed(self) -> None:
        if device.is_cuda():
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.gib[self._inside] = max(peak, self.gib.get(self._inside, 0.0))
            torch.cuda.reset_peak_memory_stats()
        self._inside = phase.current().rpartition(" > ")[2].partition(", step ")[0]
        self._tick()

    def __enter__(self) -> PhasePeaks:
        phase.tick = self._changed
        return self

    def __exit__(self, *error: Any) -> None:
        self._changed()
        phase.tick = self._tick
