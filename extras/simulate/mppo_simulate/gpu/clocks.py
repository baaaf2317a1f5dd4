"""Vector clocks: which operations on a GPU are ordered after which.

Actors execute operations in order: the host, every stream, every communicator of NCCL. An actor
counts its operations, and knows for every other actor how many of its operations have ended before
its own next one (Lamport 1978; Fidge 1988).
"""

from __future__ import annotations

from collections.abc import Mapping

HOST = "the host"


class Actor:
    """The host, a stream or a communicator.

    Args:
        name: unique among the actors of a rank.

    Attributes:
        clock: number of operations of every actor, by name, that end before this one's next.
    """

    __slots__ = ("clock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = {name: 0}

    def tick(self) -> int:
        """Start the next operation; return its number."""
        number = self.clock[self.name] + 1
        self.clock[self.name] = number
        return number

    def join(self, clock: Mapping[str, int]) -> None:
        """Order all later operations after those that ``clock`` has."""
        mine = self.clock
        for name, number in clock.items():
            if number > mine.get(name, 0):
                mine[name] = number


class StreamClock(Actor):
    """A stream of the simulated GPU.

    Args:
        name: name of the stream.
        number: as ``torch.cuda.Stream.stream_id``; 0 is the default stream.
    """

    __slots__ = ("number", "seen")

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number
        self.seen = -1
        """Version of the host's clock that this stream's has."""


class Host(Actor):
    """The host thread, which launches all operations.

    Attributes:
        version: changes whenever the clock does.
    """

    __slots__ = ("version",)

    def __init__(self) -> None:
        super().__init__(HOST)
        self.version = 0

    def tick(self) -> int:
        """See ``Actor``."""
        self.version += 1
        return super().tick()

    def join(self, clock: Mapping[str, int]) -> None:
        """See ``Actor``."""
        self.version += 1
        super().join(clock)

    def launches_on(self, stream: StreamClock) -> None:
        """Order the stream's next operation after all for which the host has waited."""
        if stream.seen != self.version:
            stream.join(self.clock)
            stream.seen = self.version
