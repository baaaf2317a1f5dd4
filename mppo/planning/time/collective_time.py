"""Seconds of collectives within a node, where they are measured, and across nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from mppo.planning.time.kernels import Collective, Kernels

EFFICIENCY = 0.8
"""Share of a link's bandwidth that collectives reach across nodes."""
LEAST = 2048
"""Bytes of a message whose time is all latency."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate; neighbours are ``stride`` ranks apart."""

    ranks: int
    stride: int = 1

    def on_node(self, gpus: int) -> int:
        """How many of them share a node of ``gpus`` GPUs."""
        return min(self.ranks, max(1, gpus // self.stride))


def collective_seconds(kernels: Kernels, kind: Collective, nbytes: float, group: Group) -> float:
    """Seconds of a collective.

    Across nodes a ring enters and leaves a node through the network cards of all members on it,
    while all-to-all sends what is for other nodes through each rank's own card.
    """
    ranks, system = group.ranks, kernels.system
    if ranks == 1 or nbytes == 0:
        return 0.0
    here = group.on_node(system.gpus_per_node)
    if here == ranks:
        return kernels.collective(kind, nbytes, ranks)
    passes = 2 if kind == "all_reduce" else 1
    # a tree of nodes, after the node's own ranks have met
    hops = passes * ceil(log2(ceil(ranks / here))) * system.latency
    if here > 1:
        hops += kernels.collective(kind, LEAST, here)
    if kind == "alltoall":
        away = nbytes * (ranks - here) / ranks
        return hops + away / (EFFICIENCY * system.across)
    ring = nbytes * (ranks - 1) / ranks * passes
    return hops + ring / (EFFICIENCY * min(system.within, here * system.across))


def message_seconds(kernels: Kernels, nbytes: float, distance: int) -> float:
    """Seconds of a message to the rank ``distance`` ranks away."""
    system = kernels.system
    crosses = distance >= system.gpus_per_node
    bandwidth = system.across if crosses else system.within
    return system.latency + nbytes / (EFFICIENCY * bandwidth)
