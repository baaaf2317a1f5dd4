"""What a simulated rank records, in the order in which its host does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mppo_simulate.gpu.accesses import Race

RecordKind = Literal["kernel", "send", "receive", "collective", "stream_wait", "host_wait"]


class Recorded(NamedTuple):
    """Something that the host of a rank did.

    Args:
        kind: "kernel": one or more operations on ``stream`` without a communication or wait between
            them; also the mark of an event. "send", "receive", "collective": the start of a
            communication. "stream_wait", "host_wait": the stream or the host waits.
        phase: name of the phase.
        line: source line.
        stream: the current stream; of a "host_wait" the stream that it waits for.
        group: of a communication: name of the process group, the same on all its ranks.
        purpose: Megatron's description of the group.
        ranks: the ranks of the group.
        peer: of a message: the other rank.
        operation: name of the collective, such as ``allreduce``.
        form: of a communication: what all its ranks must agree on: shapes, dtypes, reduction, root.
        splits: of an all-to-all: rows that go to every rank of the group, and that come from it.
        until: of a wait: index of the record whose end is awaited; -1: all of the stream.
        whole_device: a "host_wait" for all streams.
        on_host: the communication runs on the host (gloo).
        batch: number of the batch of messages that form one operation; 0: none.
    """

    kind: RecordKind
    phase: str
    line: str
    stream: str
    group: str = ""
    purpose: str = ""
    ranks: tuple[int, ...] = ()
    peer: int = -1
    operation: str = ""
    form: tuple[Any, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    until: int = -1
    whole_device: bool = False
    on_host: bool = False
    batch: int = 0

    def describe(self) -> str:
        """Operation, form, splits and source line."""
        form = ", ".join(str(x) for x in self.form)
        rows = "".join(f", {name} {list(x)}" for name, x in zip(("to", "by"), self.splits))
        return f"{self.operation} of {form}{rows} at {self.line}"


@dataclass
class RankRecord:
    """The records of a rank.

    Args:
        rank: the rank.
        records: in the order of the host.
        races: accesses to the same bytes that nothing orders.
    """

    rank: int
    records: list[Recorded] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
