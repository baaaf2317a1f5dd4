"""Device memory that the trainer and colocated servers use in turn.

The turns have a fixed order: training; weight sync, during which servers hold only their weights;
generation. Before a server allocates, every rank returns the unused memory of its allocator to the
device, because another process cannot use it otherwise and a server with too little memory exits.
Before the trainer allocates, every server has released its memory.
"""

from __future__ import annotations

from collections.abc import Callable

from mppo.parallel.collectives import wait_for_ranks
from mppo.rollout.sglang.api import CUDA_GRAPHS, KV_CACHE, MEMORY_TAGS, WEIGHTS
from mppo.rollout.sglang.fleet import Fleet

_FOR_GENERATION = (KV_CACHE, CUDA_GRAPHS)


class MemoryHandover:
    """Hands device memory over; does nothing if the servers have devices of their own. All methods
    are collective. ``give_back`` returns this rank's unused memory to the device."""

    def __init__(
        self,
        fleet: Fleet,
        world: int,
        give_back: Callable[[], None],
    ) -> None:
        self._fleet, self._world = fleet, world
        self._give_back = give_back

    def to_trainer(self) -> None:
        """Make the servers release all memory, before training."""
        if self._fleet.shares_devices:
            self._fleet.sleep(MEMORY_TAGS)

    def from_trainer(self) -> None:
        """Return every rank's unused memory to the device, before servers start."""
        if self._fleet.shares_devices:
            self._give_back()
            wait_for_ranks(self._world)

    def for_weights(self) -> None:
        """Make the servers hold only weights; the trainer needs the rest for the weight stream."""
        if self._fleet.shares_devices:
            self._fleet.sleep(_FOR_GENERATION)
            self.from_trainer()
            self._fleet.wake((WEIGHTS,))

    def for_generation(self) -> None:
        if self._fleet.shares_devices:
            self.from_trainer()
            self._fleet.wake(MEMORY_TAGS)
