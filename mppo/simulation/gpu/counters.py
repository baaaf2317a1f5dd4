"""What a simulated rank does: operations, waits of the host for the GPU, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mppo.simulation.gpu.ledger import source_line


@dataclass(frozen=True)
class Wait:
    """A place where the host waits for the GPU.

    Args:
        line: source line.
        why: what makes it wait: ``item``, ``copy to host``, ``nonzero``, ``synchronize``, ...
    """

    line: str
    why: str


@dataclass(frozen=True)
class Collective:
    """A kind of communication.

    Args:
        operation: such as ``allreduce``.
        group: Megatron's description of the group, or its number of ranks.
        size: ranks of the group.
    """

    operation: str
    group: str
    size: int


class Counters:
    """Counts by phase.

    Args:
        phase: names the phase the rank is in.

    Attributes:
        operations: by phase, those that start a kernel (views do not).
        waits: by phase and place.
        calls: collectives by phase and kind.
        bytes: what this rank hands to collectives and takes from them, by phase and kind.
        groups: names of the process groups of several ranks that were used.
        micro_batches: cut for the roles, by phase.
        unknown: places that read a floating-point number only a GPU would know; 1.0 is returned.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.operations: Counter[str] = Counter()
        self.waits: Counter[tuple[str, Wait]] = Counter()
        self.calls: Counter[tuple[str, Collective]] = Counter()
        self.bytes: Counter[tuple[str, Collective]] = Counter()
        self.groups: set[str] = set()
        self.micro_batches: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    def clear(self) -> None:
        """Begin again with all counts by phase."""
        for counts in (self.operations, self.waits, self.calls, self.bytes, self.micro_batches):
            counts.clear()

    def operation(self) -> None:
        """Count a kernel."""
        self.operations[self._phase()] += 1

    def wait(self, why: str) -> None:
        """Count a wait at the caller's source line."""
        self.waits[self._phase(), Wait(source_line(), why)] += 1

    def collective(self, kind: Collective, nbytes: int) -> None:
        """Count a collective."""
        self.calls[self._phase(), kind] += 1
        self.bytes[self._phase(), kind] += nbytes

    def micro_batch(self) -> None:
        """Count a micro-batch that is cut for a role."""
        self.micro_batches[self._phase()] += 1
