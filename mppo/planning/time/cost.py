"""Seconds of a piece of work by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass, replace

LAUNCH = 8e-6
"""Seconds that the host needs to launch an operation of a pass in PyTorch: 6.8 and 9.9 us were
measured (docs/measurements.md)."""

WAIT = 2 * LAUNCH
"""Seconds that a GPU has nothing to do when its host has waited for it: taken as two launches, one
until the host goes on, one until the next operation is there."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one GPU, and the operations that its host launches meanwhile.

    Args:
        compute: seconds of matrix products and attention.
        memory: seconds of operations that only read and write.
        network: seconds of collectives and messages that nothing hides.
        launches: number of operations.
        waits: how often the host waits for all that it has launched.
    """

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    launches: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute + other.compute,
            self.memory + other.memory,
            self.network + other.network,
            self.launches + other.launches,
            self.waits + other.waits,
        )

    def __mul__(self, times: float) -> Cost:
        own = self.slower(times)
        return replace(own, launches=self.launches * times, waits=self.waits * times)

    def slower(self, times: float) -> Cost:
        """The same work on a device that takes ``times`` as long; its host is as before."""
        device = (self.compute * times, self.memory * times, self.network * times)
        return Cost(*device, self.launches, self.waits)

    @property
    def device(self) -> float:
        return self.compute + self.memory + self.network

    @property
    def host(self) -> float:
        """Seconds for which the device waits for launches: the longer of both decides, and after
        each wait the host begins anew."""
        return max(0.0, self.launches * LAUNCH - self.device) + self.waits * WAIT

    @property
    def seconds(self) -> float:
        return self.device + self.host

    def spent(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "network": self.network,
            "host": self.host,
        }
