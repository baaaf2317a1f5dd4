"""Device memory that the trainer and servers on its devices use in turn.

The turns have a fixed order: training; weight sync, for which servers hold their weights only;
generation. Before a server allocates, every rank has returned what its allocator holds unused:
another process cannot use it, and a server that finds too little stops. Before the trainer
allocates, every server has released its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mppo.parallel.collectives import wait_for_ranks
from mppo.rollout.sglang.api import CUDA_GRAPHS, KV_CACHE, MEMORY_TAGS, WEIGHTS
from mppo.rollout.sglang.fleet import Fleet

_FOR_GENERATION = (KV_CACHE, CUDA_GRAPHS)


class MemoryHandover:
    """Hands device memory over; without effect if servers have devices of their own.

    All methods are collective.

    Args:
        fleet: the servers.
        world: number of ranks.
        group: process group of the ranks; None is the default one.
        give_back: returns this rank's unused memory to the device.
    """

    def __init__(
        self,
        fleet: Fleet,
        world: int,
        group: dist.ProcessGroup | None,
        give_back: Callable[[], None],
    ) -> None:
        self._fleet, self._world, self._group = fleet, world, group
        self._give_back = give_back

    def to_trainer(self) -> None:
        """Servers release all memory, for training."""
        if self._fleet.shares_devices:
            self._fleet.sleep(MEMORY_TAGS)

    def from_trainer(self) -> None:
        """Every rank returns what it does not use, before servers start."""
        if self._fleet.shares_devices:
            self._give_back()
            wait_for_ranks(self._world, self._group)

    def for_weights(self) -> None:
        """Servers hold weights only: the trainer needs the rest for the weight stream."""
        if self._fleet.shares_devices:
            self._fleet.sleep(_FOR_GENERATION)
            self.from_trainer()
            self._fleet.wake((WEIGHTS,))

    def for_generation(self) -> None:
        """Servers hold everything."""
        if self._fleet.shares_devices:
            self.from_trainer()
            self._fleet.wake(MEMORY_TAGS)
