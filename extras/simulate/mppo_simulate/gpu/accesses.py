"""Who last read and wrote each storage of a simulated rank, and races between them.

Two accesses to the same bytes race if no stream, event or wait of the host orders them, and one of
them writes. Freeing counts as a write by the next allocation on the stream that allocated the
storage: torch's allocator reuses memory there at once, unless ``record_stream`` or a wait makes it
wait for the other streams. An access to a storage whose memory was freed, by a resize to nothing,
is reported as a race with the line that freed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mppo_simulate.gpu.clocks import HOST, Actor
from mppo_simulate.gpu.ledger import Allocation

_FREES = "frees the memory"
_MOST_PENDING = 256
"""Freed storages that another stream may still use and that are watched, at most."""


@dataclass(frozen=True)
class Access:
    """One access to a storage.

    Args:
        does: "reads", "writes", "reuses the memory" or "frees the memory".
        line: source line.
        actor: the stream or communicator.
    """

    does: str
    line: str
    actor: str


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that nothing orders.

    Args:
        phase: the phase of the second one.
        first, second: the accesses in the order of the program.
        nbytes: size of the storage.
    """

    phase: str
    first: Access
    second: Access
    nbytes: int

    def describe(self) -> str:
        """One sentence with both source lines."""
        one, two = self.first, self.second
        if one.does == _FREES:
            return (
                f"{self.phase}: {two.actor} {two.does} at {two.line} memory that was freed at "
                f"{one.line} ({self.nbytes:,} bytes)"
            )
        return (
            f"{self.phase}: {two.actor} {two.does} at {two.line}, and nothing makes it wait for "
            f"{one.actor}, which {one.does} at {one.line} ({self.nbytes:,} bytes)"
        )


@dataclass(slots=True)
class _Span:
    """The last write and the last read by one actor of a range of bytes; number 0: none."""

    write: int = 0
    write_line: str = ""
    read: int = 0
    read_line: str = ""


@dataclass(slots=True)
class _ByActor:
    last: int = 0
    spans: dict[tuple[int, int], _Span] = field(default_factory=dict)


@dataclass(slots=True)
class _Storage:
    """The accesses to one storage.

    Args:
        nbytes: its size.
        home: the stream on which it was allocated; None for host memory.
        line: source line that allocated it, or freed it by a resize to nothing.
        by_actor: the accesses, by name of the actor.
        recorded: names of the streams that ``record_stream`` named.
    """

    nbytes: int
    home: Actor | None
    line: str = ""
    by_actor: dict[str, _ByActor] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Freed:
    """A freed storage that other streams may still use: their last accesses."""

    nbytes: int
    uses: list[tuple[int, Access]]


class Accesses:
    """All accesses of a rank.

    Attributes:
        races: the races found, each pair of source lines once.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._found: set[tuple[Access, Access]] = set()
        self._by_address: dict[int, _Storage] = {}
        self._freed: dict[str, list[_Freed]] = {}

    def begin(self, allocation: Allocation, home: Actor, phase: str, line: str) -> None:
        """Note a new storage, which may reuse memory that was freed on its stream."""
        self._by_address[allocation.address] = _Storage(allocation.size, home, line)
        freed = self._freed.get(home.name)
        if not freed or not allocation.size:
            return
        for one in freed:
            for number, use in one.uses:
                if home.clock.get(use.actor, 0) < number:
                    reuse = Access("reuses the memory", line, home.name)
                    self._race(Race(phase, use, reuse, one.nbytes))
        freed.clear()

    def end(self, allocation: Allocation) -> None:
        """Note that a storage was freed."""
        storage = self._by_address.pop(allocation.address, None)
        if storage is None or storage.home is None:
            return
        uses = [
            (number, Access(*did, name))
            for name, accesses in storage.by_actor.items()
            if name not in storage.recorded and storage.home.clock.get(name, 0) < accesses.last
            for number, did in _latest(accesses)
            if name != HOST
        ]
        if uses:
            waiting = self._freed.setdefault(storage.home.name, [])
            waiting.append(_Freed(storage.nbytes, uses))
            del waiting[:-_MOST_PENDING]

    def record_stream(self, allocation: Allocation, stream: Actor) -> None:
        """Make the reuse of a storage wait for a stream."""
        storage = self._by_address.get(allocation.address)
        if storage is not None:
            storage.recorded.add(stream.name)

    def access(
        self, allocation: Allocation, tensor: Tensor, actor: Actor, writes: bool, phase: str,
        line: str,
    ) -> None:  # fmt: skip
        """Note that the actor's current operation reads or writes a tensor."""
        storage = self._by_address.get(allocation.address)
        if storage is None:
            storage = self._by_address[allocation.address] = _Storage(allocation.size, None)
        span = _bytes_of(tensor)
        if storage.home is not None and not storage.nbytes and span[1]:
            freed = Access(_FREES, storage.line, HOST)
            second = Access("writes" if writes else "reads", line, actor.name)
            self._race(Race(phase, freed, second, span[1] - span[0]))
        for name, other in storage.by_actor.items():
            before = actor.clock.get(name, 0)
            if name != actor.name and before < other.last:
                for first in _unordered(other, span, before, writes):
                    second = Access("writes" if writes else "reads", line, actor.name)
                    self._race(Race(phase, Access(*first, name), second, storage.nbytes))
        mine = storage.by_actor.get(actor.name)
        if mine is None:
            mine = storage.by_actor[actor.name] = _ByActor()
        found = mine.spans.get(span)
        if found is None:
            found = mine.spans[span] = _Span()
        mine.last = number = actor.clock[actor.name]
        if writes:
            found.write, found.write_line = number, line
        else:
            found.read, found.read_line = number, line

    def _race(self, race: Race) -> None:
        if (race.first, race.second) not in self._found:
            self._found.add((race.first, race.second))
            self.races.append(race)


def _unordered(
    other: _ByActor, span: tuple[int, int], before: int, writes: bool
) -> Iterator[tuple[str, str]]:
    """Accesses to the span's bytes after the actor's operation ``before``: what and line."""
    begin, end = span
    for (first, last), found in other.spans.items():
        if first < end and begin < last:
            if found.write > before:
                yield "writes", found.write_line
            elif writes and found.read > before:
                yield "reads", found.read_line


def _latest(accesses: _ByActor) -> Iterator[tuple[int, tuple[str, str]]]:
    """The actor's last access to a storage."""
    for found in accesses.spans.values():
        if found.write == accesses.last:
            yield found.write, ("writes", found.write_line)
            return
        if found.read == accesses.last:
            yield found.read, ("reads", found.read_line)
            return


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its storage; both 0 for a tensor without elements."""
    if not x.numel():
        return 0, 0
    size: Any = x.element_size()
    begin = x.storage_offset() * size
    if x.is_contiguous():
        return begin, begin + x.numel() * size
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    return begin, begin + extent * size
