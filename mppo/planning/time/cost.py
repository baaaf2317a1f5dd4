"""Seconds of a piece of work by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH = 8e-6
"""Seconds that the host needs to launch an operation of a pass in PyTorch: 6.8 and 9.9 us were
measured (docs/measurements.md)."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one GPU, and the operations that its host launches meanwhile.

    Args:
        compute: seconds of matrix products and attention.
        memory: seconds of operations that only read and write.
        network: seconds of collectives and messages that nothing hides.
        launches: number of operations.
    """

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute + other.compute,
            self.memory + other.memory,
            self.network + other.network,
            self.launches + other.launches,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.compute * times, self.memory * times, self.network * times, self.launches * times
        )

    def slower(self, times: float) -> Cost:
        """The same work on a device that takes ``times`` as long; launches take as before."""
        return Cost(self.compute * times, self.memory * times, self.network * times, self.launches)

    @property
    def device(self) -> float:
        """Seconds of the device alone."""
        return self.compute + self.memory + self.network

    @property
    def host(self) -> float:
        """Seconds for which the device waits for launches: the longer of both decides."""
        return max(0.0, self.launches * LAUNCH - self.device)

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.device + self.host

    def spent(self) -> dict[str, float]:
        """Seconds by what they are spent on."""
        return {
            "compute": self.compute,
            "memory": self.memory,
            "network": self.network,
            "host": self.host,
        }
