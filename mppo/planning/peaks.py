"""Peaks of memory of one rank by phase: what its roles keep, and what a phase adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mppo.planning.memory import Memory
from mppo.planning.outside import CUDA_CONTEXT, NCCL_COMMUNICATOR, communicators
from mppo.planning.passes import StagePasses


@dataclass(frozen=True)
class RankPart:
    """One role on one rank.

    Args:
        memory: what the role keeps.
        passes: its passes.
    """

    memory: Memory
    passes: StagePasses


@dataclass(frozen=True)
class Peaks:
    """Largest number of allocated bytes in each phase of one rank.

    Args:
        resident: between steps and in optimizer steps, Megatron's gather buffers included.
        building: while each role is built, by role.
        forward: in its forward-only passes.
        updating: in its passes with gradients.
        syncing: in the weight sync.
        communicators: number of NCCL communicators.
    """

    resident: int
    building: Mapping[str, int]
    forward: Mapping[str, int]
    updating: Mapping[str, int]
    syncing: int
    communicators: int

    @property
    def outside(self) -> int:
        """Bytes outside torch's allocator: CUDA context and communicators."""
        return CUDA_CONTEXT + self.communicators * NCCL_COMMUNICATOR

    @property
    def by_phase(self) -> dict[str, int]:
        """The peaks by the phase's name."""
        named = [
            ("building", self.building),
            ("forward passes of", self.forward),
            ("updating", self.updating),
        ]
        found = {f"{what} {role}": size for what, sizes in named for role, size in sizes.items()}
        return {**found, "weight sync": self.syncing}


def rank_peaks(parts: Sequence[RankPart], streamed: int, rank: int) -> Peaks:
    """The peaks of one rank.

    Args:
        parts: the roles in the order in which they are built.
        streamed: bytes that a weight sync allocates.
        rank: the rank.
    """
    kept = sum(part.memory.resident for part in parts)
    # roles with the same layout share Megatron's buffer
    buffers = {part.passes.layout: 0 for part in parts}
    for part in parts:
        layout = part.passes.layout
        buffers[layout] = max(buffers[layout], part.passes.gather_buffer)
    resident = kept + sum(buffers.values())
    building: dict[str, int] = {}
    before = 0
    for part in parts:
        building[part.passes.role.name] = before + part.memory.building
        before += part.memory.resident
    trained = [part for part in parts if part.passes.trained]
    return Peaks(
        resident,
        building,
        {part.passes.role.name: resident + part.passes.forward for part in parts},
        {part.passes.role.name: resident + _update(part, trained) for part in trained},
        resident + streamed,
        communicators(
            ((part.passes.layout, part.passes.has_experts) for part in parts),
            rank,
            parts[0].passes.by_lists,
        ),
    )


def _update(part: RankPart, trained: Sequence[RankPart]) -> int:
    """Bytes of a role's update: its current micro-batch, and the others in flight.

    In a list of a schedule the others may be the other role's.
    """
    passes = part.passes
    other = max(p.passes.kept for p in trained) if passes.by_lists else passes.kept
    return int(passes.update + (passes.in_flight - 1) * other)
