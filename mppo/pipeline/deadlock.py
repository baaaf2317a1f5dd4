"""Whether ranks whose devices exchange messages can wait for each other for ever.

The rules are those of CUDA's streams and of torch's process groups for NCCL:

- The host of a rank issues its events in order. It waits only at "host_wait".
- A stream executes its operations one after the other. A communicator has a stream of its own, on
  which its operations wait for what the current stream held when they were issued.
- Messages have no tags: a receive takes the next message of the same communicator and sender. A
  collective operation ends when all its ranks have started it.
- With few hardware queues, several streams share one. It starts operations in the order of issue.

Every event waits for all of certain others, never for one of several. The order of execution
therefore decides nothing: the events that can ever happen are the same in every execution, and
ranks that complete here complete under all timings. ``find_hang`` computes these events.

Rules that add waits subsume those without: lists that complete under ``Rules()`` with one queue
also do with more queues or with sends that need no receiver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

EventKind = Literal["kernel", "send", "receive", "collective", "stream_wait", "host_wait"]
_NOTHING = -1


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
    stream: Hashable = "compute"
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


def find_hang(
    lists: Sequence[Sequence[RankEvent]], rules: Rules, ranks: Sequence[int] | None = None
) -> str | None:
    """Find out whether ranks wait for ever, or exchange the wrong messages.

    Ranks that do the same may be left out together with all ranks that they communicate with;
    ``ranks`` are the numbers of the lists' ranks, for the description. Returns None if every rank
    reaches the end of its list; else a description: the events that wait for each other (of each
    rank's the first, where its host waits, and the last), or the communication without a partner.
    """
    graph = _Graph()
    names = _Names(lists, ranks or range(len(lists)))
    partners = _Partners()
    for rank, events in enumerate(lists):
        _Issue(graph, partners, rank, rules).all(events)
    return partners.join(graph, rules, names) or graph.hang(names)


@dataclass(frozen=True)
class _Names:
    lists: Sequence[Sequence[RankEvent]]
    ranks: Sequence[int]

    def event(self, rank: int, at: int) -> RankEvent:
        return self.lists[rank][at]

    def name(self, rank: int, at: int) -> str:
        event = self.event(rank, at)
        text = f"rank {self.ranks[rank]}: {event.kind}"
        if event.group is not None:
            text += f" in {event.group}"
        return f"{text} ({event.label})" if event.label else text

    def circle(self, places: Sequence[tuple[int, int]]) -> str:
        """Describe events of which each waits for the next one, and the last one for the first."""
        start = next(i for i in range(len(places)) if places[i - 1][0] != places[i][0])
        shown: list[tuple[int, int]] = []
        for _, group in groupby((*places[start:], *places[:start]), key=lambda place: place[0]):
            # of one rank's events: the first, where its host waits, and the last
            first, *others = group
            waits = [one for one in others if self.event(*one).kind == "host_wait"]
            shown += dict.fromkeys((first, *waits[-1:], *others[-1:]))
        return " waits for ".join(self.name(*place) for place in (*shown, shown[0]))


class _Graph:
    """Nodes and, for each, those that wait for it."""

    def __init__(self) -> None:
        self.following: list[list[int]] = []
        self.missing: list[int] = []
        self.place: list[tuple[int, int]] = []

    def node(self, place: tuple[int, int], *previous: int) -> int:
        """Add a node of an event, ``place`` = (rank, index), that waits for others."""
        number, missing = len(self.missing), 0
        for one in previous:
            if one >= 0:
                self.following[one].append(number)
                missing += 1
        self.following.append([])
        self.missing.append(missing)
        self.place.append(place)
        return number

    def edge(self, first: int, then: int) -> None:
        self.following[first].append(then)
        self.missing[then] += 1

    def hang(self, names: _Names) -> str | None:
        """Let all nodes happen that can; describe a circle of the others."""
        missing, following = self.missing, self.following
        todo = deque(node for node, count in enumerate(missing) if not count)
        left = len(missing)
        while todo:
            left -= 1
            for node in following[todo.popleft()]:
                missing[node] -= 1
                if not missing[node]:
                    todo.append(node)
        if not left:
            return None
        awaited: dict[int, list[int]] = {node: [] for node, count in enumerate(missing) if count}
        for node in awaited:
            for then in following[node]:
                awaited[then].append(node)
        circle = dict.fromkeys(self.place[node] for node in self._circle(awaited))
        return names.circle(list(circle))

    def _circle(self, awaited: Mapping[int, Sequence[int]]) -> list[int]:
        """Nodes of which each waits for the next one, and the last one for the first; of the
        circles through one node, one that changes the rank least often. ``awaited`` are, for every
        node that waits for ever, the others among them that it waits for."""
        start, seen = next(iter(awaited)), set()
        while start not in seen:
            seen.add(start)
            start = awaited[start][0]
        before: dict[int, int] = {}
        todo = deque([(start, start)])
        while start not in before:
            node, waiting = todo.popleft()
            if node != start or waiting != start:
                if node in before:
                    continue
                before[node] = waiting
            for one in awaited[node]:
                if self.place[one][0] == self.place[node][0]:
                    todo.appendleft((one, node))
                else:
                    todo.append((one, node))
        found = [before[start]]
        while found[-1] != start:
            found.append(before[found[-1]])
        return found[::-1]


class _Partners:
    """Start and end of every communication, by its communicator."""

    def __init__(self) -> None:
        self.sends: dict[Hashable, list[tuple[int, int, int, int]]] = {}
        self.receives: dict[Hashable, list[tuple[int, int, int, int]]] = {}
        self.collectives: dict[tuple[Hashable, bool], dict[int, list[tuple[int, int, int]]]] = {}
        self.members: dict[tuple[Hashable, bool], set[int]] = {}

    def add(self, rank: int, at: int, event: RankEvent, start: int, end: int) -> None:
        if event.kind == "collective":
            group = event.group, event.on_host
            self.members.setdefault(group, set()).update(event.ranks)
            self.collectives.setdefault(group, {}).setdefault(rank, []).append((start, end, at))
            return
        pair, table = (rank, event.peer), self.sends
        if event.kind == "receive":
            pair, table = (event.peer, rank), self.receives
        table.setdefault((event.group, event.on_host, *pair), []).append((start, end, rank, at))

    def join(self, graph: _Graph, rules: Rules, names: _Names) -> str | None:
        """Let each communication wait for its partners; describe one that has none."""
        for key in self.sends.keys() | self.receives.keys():
            sends, receives = self.sends.get(key, []), self.receives.get(key, [])
            for (s_start, s_end, *sender), (r_start, r_end, *receiver) in zip(
                sends, receives, strict=False
            ):
                messages = {names.event(*sender).message, names.event(*receiver).message}
                if len(messages - {None}) > 1:
                    return f"{names.name(*sender)} is received by {names.name(*receiver)}"
                graph.edge(s_start, r_end)
                if rules.rendezvous:
                    graph.edge(r_start, s_end)
            if left := [*sends[len(receives) :], *receives[len(sends) :]]:
                return f"{names.name(*left[0][2:])} has no partner"
        for group, by_rank in self.collectives.items():
            members = self.members[group]
            counts = {rank: len(by_rank.get(rank, ())) for rank in sorted(members)}
            if len(set(counts.values())) > 1:
                by_number = {names.ranks[rank]: count for rank, count in counts.items()}
                return f"group {group[0]}: numbers of collectives differ between ranks: {by_number}"
            for parts in zip(*by_rank.values(), strict=True):
                places = [(rank, at) for rank, (_, _, at) in zip(by_rank, parts)]
                first, *others = places
                for place in others:
                    if names.event(*place).message != names.event(*first).message:
                        return f"{names.name(*place)} meets {names.name(*first)}"
                joined = graph.node(graph.place[parts[0][0]], *(start for start, *_ in parts))
                for _, end, _ in parts:
                    graph.edge(joined, end)
        return None


class _Issue:
    """The host of one rank, which issues its events."""

    def __init__(self, graph: _Graph, partners: _Partners, rank: int, rules: Rules) -> None:
        self._graph, self._partners, self._rank, self._rules = graph, partners, rank, rules
        self._host = _NOTHING
        self._tails: dict[Hashable, int] = {}
        self._queue_of: dict[Hashable, int] = {}
        self._started = [_NOTHING] * rules.queues
        self._ends: list[int] = []
        self._batch = 0, _NOTHING, _NOTHING

    def all(self, events: Sequence[RankEvent]) -> None:
        for at, event in enumerate(events):
            place = self._rank, at
            match event.kind:
                case "kernel":
                    end = self._on_stream(place, event.stream)
                case "stream_wait":
                    end = self._on_stream(place, event.stream, *self._awaited(event))
                case "host_wait":
                    end = self._host_wait(place, self._awaited(event))
                case _:
                    end = self._communicate(place, event)
            self._ends.append(end)
            if event.kind == "kernel" and self._rules.host_waits == "stream":
                self._host_wait(place, (end,))
            elif event.kind == "kernel" and self._rules.host_waits == "device":
                self._host_wait(place, self._tails.values())

    def _awaited(self, event: RankEvent) -> Collection[int]:
        if event.whole_device:
            return self._tails.values()
        if event.until is not None:
            return (self._ends[event.until],)
        return (self._tails.get(event.stream, _NOTHING),)

    def _host_wait(self, place: tuple[int, int], awaited: Iterable[int]) -> int:
        self._host = self._graph.node(place, self._host, *awaited)
        return self._host

    def _queue(self, stream: Hashable) -> int:
        return self._queue_of.setdefault(stream, len(self._queue_of) % self._rules.queues)

    def _on_stream(self, place: tuple[int, int], stream: Hashable, *awaited: int) -> int:
        """An operation on a stream, or the stream's wait for others."""
        queue, tail = self._queue(stream), self._tails.get(stream, _NOTHING)
        node = self._graph.node(place, self._host, tail, self._started[queue], *awaited)
        self._tails[stream] = self._started[queue] = node
        return node

    def _communicate(self, place: tuple[int, int], event: RankEvent) -> int:
        """Start a communication, or the batch that it belongs to; return its end."""
        batch, start, end = self._batch
        follows = self._ends and end == self._ends[-1]
        if not (event.batch and batch == event.batch and follows):
            start, end = self._start(place, event)
            self._batch = event.batch, start, end
        self._partners.add(*place, event, start, end)
        return end

    def _start(self, place: tuple[int, int], event: RankEvent) -> tuple[int, int]:
        graph = self._graph
        if event.on_host:
            start = graph.node(place, self._host)
            return start, graph.node(place, start)
        stream: Hashable = "communicator", event.group
        if event.kind != "collective" and self._rules.pair_communicators and not event.batch:
            stream = *stream, event.peer
        queue = self._queue(stream)
        ready = self._tails.get(event.stream, _NOTHING), self._tails.get(stream, _NOTHING)
        start = graph.node(place, self._host, *ready, self._started[queue])
        end = self._tails[stream] = graph.node(place, start)
        self._started[queue] = start
        return start, end
