"""What the hosts of ranks do, as lists of events; and a quick proof that the ranks complete.

``deadlock`` has the rules by which events wait for each other. In the proof a rank does its events
strictly one after the other: whatever waits for something holds up everything behind it, on the
host and on all streams. Only communicators with hardware queues of their own begin a communication
later than its turn. Under any ``Rules`` each event waits for some of what it waits for here. Ranks
that complete here therefore complete under them; of ranks that do not, nothing is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

EventKind = Literal["kernel", "send", "receive", "collective", "stream_wait", "host_wait"]

COMPUTE_STREAM = "compute"
"""Name of the stream on which a rank computes."""


class RankEvent(NamedTuple):
    """Something that the host of a rank does; each rank has a list of them, in order.

    Args:
        kind: "kernel": computation on ``stream`` that waits for nothing else and ends. "send",
            "receive", "collective": start a communication; the host and ``stream`` do not wait for
            it. "stream_wait": ``stream`` waits. "host_wait": the host waits. (A blocking
            operation of torch is the communication and a "stream_wait" for it; a blocking
            ``Work.wait()`` of a CPU tensor's operation is a "host_wait".)
        stream: the stream that is current on the host; for "host_wait" without ``until`` and
            ``whole_device`` the stream that it waits for.
        group: of a communication: name of the process group; the same on all its ranks, and
            different for groups with communicators of their own.
        peer: of a message: index of the other rank's list.
        ranks: of a collective: indices of its ranks' lists.
        until: of a wait: index in the rank's own list of an earlier event. Its end is awaited. An
            event that is recorded on a stream is the last kernel of that stream, or a "kernel" of
            its own.
        whole_device: of a "host_wait": it waits for all streams, as freeing device memory does.
        on_host: of a communication: it runs beside the device (gloo), as soon as it is issued.
        batch: communications with the same number other than 0 that directly follow each other
            are one operation of the group's own communicator (``batch_isend_irecv``).
        message: what a communication carries, such as shape and type; None: not known. Its ranks
            must agree.
        label: describes the event in the report, such as its line of source.
    """

    kind: EventKind
    stream: Hashable = COMPUTE_STREAM
    group: Hashable = None
    peer: int = -1
    ranks: tuple[int, ...] = ()
    until: int | None = None
    whole_device: bool = False
    on_host: bool = False
    batch: int = 0
    message: Hashable = None
    label: object = ""


@dataclass(frozen=True)
class Rules:
    """What the events wait for.

    Args:
        rendezvous: a send ends only when its receive has started; False: NCCL's buffers hold it.
        pair_communicators: two ranks of a group have a communicator for their messages (process
            groups of torch that are initialized when they are first used); False: they use the
            communicator of the whole group, as groups do that are bound to a device.
        queues: number of hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``). Streams take them in
            turn, in the order of their first use.
        host_waits: what the host also waits for after every kernel: "nothing"; the kernel's
            "stream", as a copy of a count to the host does; or the whole "device", as the
            allocator does when it returns memory, and the first launch of a kernel.
    """

    rendezvous: bool = True
    pair_communicators: bool = True
    queues: int = 1
    host_waits: Literal["nothing", "stream", "device"] = "nothing"


def complete_in_order(lists: Sequence[Sequence[RankEvent]], rules: Rules) -> bool:
    """Whether all ranks complete under the rules, with partners for all communications, even if
    each does one event after the other; False: they may or may not. Batches are not examined."""
    meetings = _Meetings()
    ranks = [_Rank(rank, events, rules, meetings) for rank, events in enumerate(lists)]
    ready = list(ranks)
    while ready:
        if not ready.pop().proceed(ready):
            return False
    return all(rank.ended for rank in ranks) and meetings.all_complete()


class _Meeting:
    """A communication: how many of its ranks have not started it, and what waits for its end."""

    __slots__ = ("content", "joined", "missing", "then", "waiting")

    def __init__(self, size: int, content: Hashable) -> None:
        self.missing, self.joined, self.content = size, 0, content
        self.waiting: list[_Rank] = []
        self.then: list[_Meeting] = []

    def start(self, ready: list[_Rank]) -> None:
        """Start it on a rank, and after the last one what follows; ``ready`` gets who waited."""
        started = [self]
        while started:
            one = started.pop()
            one.missing -= 1
            if not one.missing:
                ready += one.waiting
                started += one.then


class _Meetings:
    def __init__(self) -> None:
        self._all: dict[Hashable, list[_Meeting]] = {}
        self._joined: dict[Hashable, int] = {}

    def join(self, key: Hashable, side: Hashable, size: int, content: Hashable) -> _Meeting | None:
        """A rank's next communication by communicator and direction; None: its ``content`` (the
        message, or the ranks and what they sum) is not its partner's."""
        known, at = self._all.setdefault(key, []), self._joined.get((key, side), 0)
        self._joined[key, side] = at + 1
        if at == len(known):
            known.append(_Meeting(size, content))
        meeting = known[at]
        meeting.joined += 1
        same = content == meeting.content or None in (content, meeting.content)
        return meeting if same and meeting.joined <= size else None

    def all_complete(self) -> bool:
        return not any(meeting.missing for known in self._all.values() for meeting in known)


class _Rank:
    def __init__(
        self, rank: int, events: Sequence[RankEvent], rules: Rules, meetings: _Meetings
    ) -> None:
        self._rank, self._events, self._rules, self._meetings = rank, events, rules, meetings
        self._next = 0
        self._of_event: dict[int, _Meeting] = {}
        self._last: dict[Hashable, _Meeting] = {}
        streams = {event.stream for event in events}
        streams |= {self._stream(event) for event in events if event.group is not None}
        self._own_queues = len(streams) <= rules.queues

    @property
    def ended(self) -> bool:
        return self._next == len(self._events)

    def proceed(self, ready: list[_Rank]) -> bool:
        """Do events until one must wait; add the ranks that waited for them to ``ready``. Returns
        whether all communications agree with their partners'."""
        events, of_event, at = self._events, self._of_event, self._next
        each_waits = self._rules.host_waits == "device"
        while at < len(events):
            event = events[at]
            kind, awaited = event.kind, None
            if kind == "kernel":
                awaited = self._unfinished() if each_waits else None
            elif kind == "stream_wait" or kind == "host_wait":
                if event.whole_device:
                    awaited = self._unfinished()
                elif event.until is not None:
                    awaited = of_event.get(event.until)
            elif not self._own_queues and self._is_busy(event):
                awaited = self._last[self._stream(event)]
            elif not self._start(at, event, ready):
                return False
            if awaited is not None and awaited.missing:
                awaited.waiting.append(self)
                break
            at += 1
        self._next = at
        return True

    def _unfinished(self) -> _Meeting | None:
        return next((one for one in self._last.values() if one.missing), None)

    def _stream(self, event: RankEvent) -> Hashable:
        pair = event.kind != "collective" and self._rules.pair_communicators
        return ("communicator", event.group, event.peer if pair else None, event.on_host)

    def _is_busy(self, event: RankEvent) -> bool:
        last = self._last.get(self._stream(event))
        return last is not None and last.missing > 0

    def _start(self, at: int, event: RankEvent, ready: list[_Rank]) -> bool:
        kind, group, here, peer = event.kind, (event.group, event.on_host), self._rank, event.peer
        if event.batch:
            return False
        if kind == "collective":
            content = event.ranks, event.message
            meeting = self._meetings.join(group, here, len(event.ranks), content)
        else:
            pair = (here, peer) if kind == "send" else (peer, here)
            meeting = self._meetings.join((group, pair), here, 2, event.message)
        if meeting is None:
            return False
        stream = self._stream(event)
        last = self._last.get(stream)
        self._of_event[at] = self._last[stream] = meeting
        if last is not None and last.missing:
            last.then.append(meeting)
        else:
            meeting.start(ready)
        return True
