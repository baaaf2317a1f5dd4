"""The ledger of all allocations on the simulated GPU."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import mppo

BLOCK = 512
"""Torch's allocator rounds sizes up to a multiple of this number of bytes."""
_LARGE = 1 << 20
"""Smallest allocation, in bytes, whose source line is recorded."""
_LISTED = 1 << 16
"""Smallest allocation, in bytes, that is kept in ``Ledger.allocations``."""
_FIRST_ADDRESS = 1 << 40
_OWN = str(Path(__file__).parents[1])
_PACKAGE_ROOT = str(Path(mppo.__file__).parents[1]) + "/"


@cache
def _shown(filename: str) -> str | None:
    """Name of a source file in reports; None for torch, Python and the simulation."""
    hidden = ("/torch/", "<frozen", "<string>", "/contextlib.py", "/typing_extensions.py")
    if filename.startswith(_OWN) or any(part in filename for part in hidden):
        return None
    return filename.rsplit("site-packages/", 1)[-1].removeprefix(_PACKAGE_ROOT)


def source_line() -> str:
    """Return ``file:line`` of the innermost caller outside torch and the simulation."""
    frame = sys._getframe(1)
    while frame is not None:
        name = _shown(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


@dataclass(slots=True)
class Allocation:
    """One storage on the simulated GPU.

    Args:
        size: bytes, rounded up as by torch's allocator.
        purpose: its purpose; the phase that allocated it, unless ``Ledger.assign`` sets another.
        line: source line that allocated it; empty for small ones.
        address: a unique address.
        begin: time at which it was allocated, as the number of allocations before it.
        end: time at which it was freed; None: it has not been freed.
    """

    size: int
    purpose: str
    line: str
    address: int
    begin: int
    end: int | None = None


@dataclass(frozen=True)
class Peak:
    """The largest number of allocated bytes in a phase.

    Args:
        size: number of bytes.
        moment: time of the peak, as the number of allocations before it.
        line: source line of the allocation that reached the peak.
    """

    size: int
    moment: int
    line: str


class Ledger:
    """Records all allocations and the peaks of allocated bytes.

    Args:
        phase: returns the name of the current phase.

    Attributes:
        now: number of currently allocated bytes.
        moment: number of allocations so far; the ledger's time.
        peaks: the peak of each phase.
        line_peaks: the peak among the large allocations of a source line, by phase and line.
        allocations: all allocations so far, freed ones included, except small ones.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.now = 0
        self.moment = 0
        self.peaks: dict[str, Peak] = {}
        self.line_peaks: dict[tuple[str, str], Peak] = {}
        self.allocations: list[Allocation] = []
        self._living: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._next_address = _FIRST_ADDRESS
        self.began: Callable[[Allocation], None] = lambda allocation: None
        self.ended: Callable[[Allocation], None] = lambda allocation: None
        """Called with every allocation when it begins and when it has ended."""

    def note(self, tensor: Tensor) -> Allocation:
        """Return the allocation of a tensor's storage; record it if it is new or resized."""
        return self.note_storage(tensor.untyped_storage())

    def note_storage(self, storage: Any) -> Allocation:
        """:meth:`note` of a storage."""
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        known: Allocation | None = getattr(storage, "allocation", None)
        if known is not None and known.size == size:
            return known
        phase = self._phase()
        line = source_line() if size >= _LARGE else ""
        found = Allocation(size, phase, line, self._next_address, self.moment)
        if known is None:
            storage.reference = weakref.ref(storage, self._freed)
        else:
            found.purpose = known.purpose
            self._end(known)
        storage.allocation = found
        self._living[id(storage.reference)] = storage.reference, found
        self._next_address += size + BLOCK
        self.began(found)
        self.moment += 1
        self.now += size
        if size >= _LISTED:
            self.allocations.append(found)
        if size <= (0 if known is None else known.size):
            return found  # freed memory makes no peak: parts leave when a phase begins
        if line:
            before = self.line_peaks.get((phase, line))
            if before is None or self.now > before.size:
                self.line_peaks[phase, line] = Peak(self.now, found.begin, line)
        peak = self.peaks.get(phase)
        if peak is None or self.now > peak.size:
            self.peaks[phase] = Peak(self.now, found.begin, line or source_line())
        return found

    def assign(self, tensors: Iterable[Tensor | None], purpose: str) -> None:
        """Set the purpose of the tensors' storages."""
        for tensor in tensors:
            if tensor is not None and isinstance(tensor, FakeTensor):
                self.note(tensor).purpose = purpose

    def composition(self, moment: int | None = None) -> Counter[str]:
        """Allocated bytes by purpose at a moment; None: now, small allocations included."""
        found: Counter[str] = Counter()
        if moment is None:
            for _, allocation in self._living.values():
                found[allocation.purpose] += allocation.size
            return found
        for allocation in self.allocations:
            if allocation.begin <= moment and (allocation.end is None or allocation.end > moment):
                found[allocation.purpose] += allocation.size
        return found

    def _freed(self, reference: weakref.ref) -> None:
        self._end(self._living.pop(id(reference))[1])

    def _end(self, allocation: Allocation) -> None:
        allocation.end = self.moment
        self.ended(allocation)
        self.now -= allocation.size
