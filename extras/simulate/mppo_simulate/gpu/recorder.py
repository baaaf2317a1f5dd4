"""Records what a simulated rank does, and keeps the clocks of its host, streams and communicators.

The rules are CUDA's, and those of torch 2.13 for NCCL. An asynchronous collective and a message run
on a stream of their communicator, which first waits for what the current stream held; other
collectives run on the current stream. ``Work.wait`` makes the current stream wait. Until then the
work keeps the tensors, but not memory that is taken from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mppo_simulate.gpu.accesses import Accesses, Race
from mppo_simulate.gpu.clocks import Actor, Host, StreamClock
from mppo_simulate.gpu.ledger import Allocation, Ledger, source_line
from mppo_simulate.records import Recorded, RecordKind

Mark = tuple[dict[str, int], int]
"""A moment of a stream: its clock, and the index of the record."""


class RankRecorder:
    """The recorder of a rank.

    Args:
        phase: returns the name of the current phase.
        ledger: the rank's ledger.
        on: record operations; False: only the streams exist, as for ``torch.cuda``.

    Attributes:
        records: what the host did, in order.
        current: the current stream.
        default: the default stream.
        reduction: the reduction of the collective that is being started; "" for none.
        on: see above.
        batch: number of the current batch of messages; 0: none.
    """

    def __init__(self, phase: Callable[[], str], ledger: Ledger, on: bool) -> None:
        self.records: list[Recorded] = []
        self.default = StreamClock("the compute stream", 0)
        self.current = self.default
        self.reduction = ""
        self.batch = 0
        self.on = on
        self._phase, self._ledger = phase, ledger
        self._host = Host()
        self._streams = [self.default]
        self._communicators: dict[tuple, Actor] = {}
        self._accesses = Accesses()
        self._host_memory = 0
        self._started: Mark = {}, -1
        self._tensors: list[Tensor] = []
        self._open: dict[int, tuple[Any, Mark, bool, list[Tensor]]] = {}
        if on:
            ledger.began, ledger.ended = self._began, self._accesses.end

    @property
    def races(self) -> list[Race]:
        """The races found."""
        return self._accesses.races

    def new_stream(self) -> StreamClock:
        """Make a stream besides the default one."""
        line = source_line() if self.on else ""
        stream = StreamClock(f"stream {len(self._streams)} ({line})", len(self._streams))
        self._streams.append(stream)
        return stream

    def launch(self) -> None:
        """Start the next kernel on the current stream."""
        if not self.on:
            return
        stream, records = self.current, self.records
        self._host.launches_on(stream)
        stream.tick()
        if not records or records[-1].kind != "kernel" or records[-1].stream != stream.name:
            self._record("kernel")

    def touch(
        self,
        read: Iterable[Any],
        written: Iterable[Any],
        actor: Actor | None = None,
        line: str | None = None,
    ) -> None:
        """Note which tensors the kernel that was started last reads and writes."""
        if not self.on:
            return
        phase, line, actor = self._phase(), line or source_line(), actor or self.current
        for tensors, writes in ((read, False), (written, True)):
            for x in tensors:
                allocation = self._allocation(x)
                if allocation is not None:
                    self._accesses.access(allocation, x, actor, writes, phase, line)

    def process_reads(self, tensor: Tensor, line: str) -> None:
        """Note that another process, which the host has told to, reads a tensor of the GPU."""
        self._host.tick()
        self.touch([tensor], [], self._host, line)

    def pin(self, tensor: Tensor) -> None:
        """Mark a tensor in pinned host memory, and follow the accesses to it if recording."""
        self._host_memory -= 1
        storage: Any = tensor.untyped_storage()
        storage.pinned = Allocation(storage.nbytes(), "", "", self._host_memory, 0)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor in host memory is pinned."""
        return bool(self._host_memory) and hasattr(tensor.untyped_storage(), "pinned")

    def host_touches(self, read: Iterable[Any], written: Iterable[Any]) -> None:
        """Note which tensors in host memory the host itself reads and writes."""
        if self.on and self._host_memory:
            before, after = ([x for x in tensors if isinstance(x, Tensor) and self.is_pinned(x)]
                             for tensors in (read, written))  # fmt: skip
            if before or after:
                self._host.tick()
                self.touch(before, after, self._host)

    def mark(self, stream: StreamClock) -> Mark:
        """The moment at which a stream has done all that it holds now: an event."""
        if not self.on:
            return {}, -1
        self._host.launches_on(stream)
        self._record("kernel", stream)
        return dict(stream.clock), len(self.records) - 1

    def stream_waits(self, stream: StreamClock, mark: Mark) -> None:
        """Make a stream wait for an event or a communication."""
        clock, until = mark
        if self.on and until >= 0:
            self._host.launches_on(stream)
            stream.join(clock)
            self._record("stream_wait", stream, until=until)

    def host_waits(self, stream: StreamClock | None = None) -> None:
        """The host waits for a stream; None: the current one."""
        if self.on:
            stream = stream or self.current
            self._host.join(stream.clock)
            self._record("host_wait", stream)

    def host_waits_until(self, mark: Mark) -> None:
        """The host waits for an event or a communication on the host."""
        clock, until = mark
        if self.on and until >= 0:
            self._host.join(clock)
            self._record("host_wait", until=until)

    def host_waits_for_device(self) -> None:
        """The host waits for all streams and communicators."""
        if not self.on:
            return
        for actor in (*self._streams, *self._communicators.values()):
            self._host.join(actor.clock)
        self._record("host_wait", whole_device=True)
        self._open = {key: found for key, found in self._open.items() if found[2]}

    def has_seen(self, mark: Mark) -> None:
        """The host knows that an event has happened, from a query."""
        if self.on:
            self._host.join(mark[0])

    def record_stream(self, tensor: Tensor, stream: StreamClock) -> None:
        """Make the reuse of a tensor's memory wait for a stream, if the tensor is freed."""
        allocation = self._allocation(tensor) if self.on else None
        if allocation is not None:
            self._accesses.record_stream(allocation, stream)

    def communicate(
        self, kind: RecordKind, operation: str, group: dist.ProcessGroup | None, form: tuple,
        read: list[Tensor], written: list[Tensor], peer: int = -1, splits: tuple = (),
        is_async: bool = True, on_host: bool = False,
    ) -> None:  # fmt: skip
        """Start a communication.

        Args:
            kind, operation, form, splits, on_host: see ``Recorded``.
            group: the process group; None: the default one.
            read, written: the tensors, on the GPU unless ``on_host``.
            peer: of a message: the other rank's number within the group.
            is_async: whether it has a stream of its own.
        """
        if not self.on:
            return
        group = group or dist.group.WORLD
        assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        other = ranks[peer] if peer >= 0 else -1
        name, purpose = group.group_name, group.group_desc
        self._record(
            kind, group=name, purpose=purpose, ranks=ranks, peer=other, operation=operation,
            form=form, splits=splits, on_host=on_host, batch=self.batch,
        )  # fmt: skip
        index = len(self.records) - 1
        self._tensors = [*read, *written]
        if on_host:
            self._started = {}, index
            return
        self._host.launches_on(self.current)
        actor: Actor = self.current
        if is_async or kind != "collective":
            actor = self._communicator(name, purpose, kind, other)
            actor.join(self.current.clock)
        actor.tick()
        self.touch(read, written, actor)
        self._started = dict(actor.clock), index

    def objects(self, operation: str, group: dist.ProcessGroup | None, form: tuple = ()) -> None:
        """Record an exchange of Python objects, for which the host waits."""
        self.communicate("collective", operation, group, form, [], [], on_host=True)
        self.host_waits_until(self._started)

    def register(self, work: Any) -> None:
        """Connect a handle with the communication that was started last."""
        if self.on and self._started[1] >= 0:
            on_host = self.records[self._started[1]].on_host
            self._open[id(work)] = work, self._started, on_host, self._tensors
            self._started, self._tensors = ({}, -1), []

    def wait(self, work: Any) -> None:
        """``Work.wait``: the current stream waits; for a communication on the host, the host."""
        found = self._open.get(id(work))
        if found is None:
            return
        _, mark, on_host, _ = found
        self._open[id(work)] = work, mark, on_host, []  # another stream may wait, too
        if on_host:
            self.host_waits_until(mark)
        else:
            self.stream_waits(self.current, mark)

    def _communicator(self, name: str, purpose: str, kind: RecordKind, peer: int) -> Actor:
        key = (name,) if kind == "collective" or self.batch else (name, peer)
        found = self._communicators.get(key)
        if found is None:
            with_peer = f" with rank {peer}" if len(key) > 1 else ""
            text = f"NCCL's stream of group {name} ({purpose or 'default'}){with_peer}"
            found = self._communicators[key] = Actor(text)
        return found

    def _record(self, kind: RecordKind, stream: StreamClock | None = None, **more: Any) -> None:
        where = (stream or self.current).name
        self.records.append(Recorded(kind, self._phase(), source_line(), where, **more))

    def _began(self, allocation: Allocation) -> None:
        self._host.launches_on(self.current)
        self._accesses.begin(allocation, self.current, self._phase(), source_line())

    def _allocation(self, x: Any) -> Allocation | None:
        """The storage of a tensor on the GPU or in pinned memory; None: of another tensor."""
        if isinstance(x, FakeTensor):
            return self._ledger.note(x) if x.fake_device.type != "cpu" else None
        if not isinstance(x, Tensor):
            return None
        if x.is_meta and not self.is_pinned(x):
            self.pin(x)
        return getattr(x.untyped_storage(), "pinned", None)
