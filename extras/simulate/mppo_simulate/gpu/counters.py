"""Counters of a simulated rank: operations, waits of the host for the GPU, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mppo_simulate.gpu.ledger import source_line


@dataclass(frozen=True)
class Wait:
    """A place where the host waits for the GPU.

    Args:
        line: source line.
        why: the cause: ``item``, ``copy to host``, ``nonzero``, ``synchronize``, ...
    """

    line: str
    why: str


@dataclass(frozen=True)
class Collective:
    """A kind of communication.

    Args:
        operation: name of the collective, such as ``allreduce``.
        group: Megatron's description of the group, or its number of ranks.
        size: number of ranks of the group.
    """

    operation: str
    group: str
    size: int


class Counters:
    """Counts by phase.

    Args:
        phase: returns the name of the current phase.

    Attributes:
        operations: number of operations that start a kernel (not views), by phase.
        waits: number of waits of the host for the GPU, by phase and place.
        calls: number of collectives, by phase and kind.
        bytes: bytes of the tensors passed to collectives, inputs and outputs, by phase and kind.
        communicators: those of NCCL that were used, by the name of the process group, and for
            messages that are no batch by the other rank's number in it.
        micro_batches: number of micro-batches cut for the roles, by phase.
        unknown: number of reads of floating-point numbers that only a GPU has, by source
            line.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.operations: Counter[str] = Counter()
        self.waits: Counter[tuple[str, Wait]] = Counter()
        self.calls: Counter[tuple[str, Collective]] = Counter()
        self.bytes: Counter[tuple[str, Collective]] = Counter()
        self.communicators: set[tuple[str, int | None]] = set()
        self.micro_batches: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.on_wait: Callable[[], None] = lambda: None
        """Called when the host waits for the current stream."""

    def clear(self) -> None:
        """Reset all counts by phase."""
        for counts in (self.operations, self.waits, self.calls, self.bytes, self.micro_batches):
            counts.clear()

    def operation(self) -> None:
        """Count a kernel."""
        self.operations[self._phase()] += 1

    def wait(self, why: str) -> None:
        """Count a wait for the current stream at the caller's source line."""
        self.count_wait(why)
        self.on_wait()

    def count_wait(self, why: str) -> None:
        """Count a wait for something else."""
        self.waits[self._phase(), Wait(source_line(), why)] += 1

    def collective(self, kind: Collective, nbytes: int) -> None:
        """Count a collective."""
        self.calls[self._phase(), kind] += 1
        self.bytes[self._phase(), kind] += nbytes

    def micro_batch(self) -> None:
        """Count a micro-batch."""
        self.micro_batches[self._phase()] += 1
