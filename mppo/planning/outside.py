"""Memory of a rank outside torch's allocator: its CUDA context and NCCL's communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mppo.parallel.layout import Coordinates, Layout

CUDA_CONTEXT = int(0.6 * 1024**3)
"""Bytes of a process's CUDA context: driver, kernel code, cuBLAS workspaces. Published measurements
lie between 0.4 and 0.8 GiB."""
NCCL_COMMUNICATOR = 128 * 1024**2
"""Bytes of the buffers of one NCCL communicator with default settings on NVLink."""


def communicators(roles: Iterable[tuple[Layout, bool]], rank: int, by_lists: bool) -> int:
    """Number of NCCL communicators that a rank uses.

    One for the default group, one for all groups with the same ranks
    (``mppo.parallel.shared_groups``), and for messages between pipeline stages one, or one in each
    direction.

    Args:
        roles: each role's layout, and whether it has experts on this rank.
        rank: the rank.
        by_lists: actor and critic run by the lists of a schedule.
    """
    found: set[Any] = set()
    for layout, has_experts in set(roles):
        here = layout.coordinates(rank)
        everyone = [(other, layout.coordinates(other)) for other in range(layout.world)]
        # gradient norms are summed over all ranks
        found.add(tuple(range(layout.world)))
        for same in (*_AXES, *(_EXPERT_AXES if has_experts else ())):
            found.add(tuple(other for other, at in everyone if same(at) == same(here)))
        if layout.pp > 1:
            found |= {("forward", layout.pp), *({("back", layout.pp)} if by_lists else ())}
    return 1 + sum(len(ranks) > 1 for ranks in found)


_AXES: tuple[Callable[[Coordinates], Any], ...] = (
    lambda at: (at.pp, at.dp, at.cp),  # TP
    lambda at: (at.pp, at.tp),  # DP and CP
    lambda at: (at.pp, at.tp, at.dp),  # CP
)
"""The coordinates that the ranks of a group have in common."""

_EXPERT_AXES: tuple[Callable[[Coordinates], Any], ...] = (
    lambda at: (at.pp, at.edp, at.etp),  # EP
    lambda at: (at.pp, at.edp, at.ep),  # ETP
    lambda at: (at.pp, at.ep, at.etp),  # data parallelism of experts
)
"""The same for experts."""
