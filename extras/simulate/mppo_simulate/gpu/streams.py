"""``torch.cuda``'s streams and events, and torch's process groups and works, on a recorder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.recorder import Mark, RankRecorder

_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of ``ProcessGroup`` that return a work."""

_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class CudaStream:
    """``torch.cuda.Stream``. Operations complete at once, so that no method blocks."""

    recorder: RankRecorder
    counters: Counters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._start(self.recorder.new_stream())

    def _start(self, actor: Any) -> None:
        self.actor = actor
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.cuda_stream = self.stream_id = actor.number

    def __enter__(self) -> CudaStream:
        self._before = self.recorder.current
        self.recorder.current = self.actor
        return self

    def __exit__(self, *error: object) -> None:
        self.recorder.current = self._before

    def synchronize(self) -> None:
        self.counters.count_wait("synchronize")
        self.recorder.host_waits(self.actor)

    def query(self) -> bool:
        self.recorder.has_seen((self.actor.clock, 0))
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or CudaEvent()
        event.record(self)
        return event

    def wait_event(self, event: CudaEvent) -> None:
        self.recorder.stream_waits(self.actor, event.mark)

    def wait_stream(self, stream: CudaStream) -> None:
        self.recorder.stream_waits(self.actor, self.recorder.mark(stream.actor))


class CudaEvent:
    """``torch.cuda.Event``."""

    recorder: RankRecorder
    counters: Counters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mark: Mark = {}, -1

    def record(self, stream: CudaStream | None = None) -> None:
        self.mark = self.recorder.mark(self.recorder.current if stream is None else stream.actor)

    def wait(self, stream: CudaStream | None = None) -> None:
        waiting = self.recorder.current if stream is None else stream.actor
        self.recorder.stream_waits(waiting, self.mark)

    def query(self) -> bool:
        self.recorder.has_seen(self.mark)
        return True

    def synchronize(self) -> None:
        self.counters.count_wait("synchronize")
        self.recorder.host_waits_until(self.mark)

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def stream_functions(recorder: RankRecorder, counters: Counters) -> dict[str, Any]:
    """The functions and classes of ``torch.cuda`` that concern streams, by name."""
    for kind in (CudaStream, CudaEvent):
        kind.recorder, kind.counters = recorder, counters
    streams: dict[int, CudaStream] = {}

    def of(actor: Any) -> CudaStream:
        if actor.number not in streams:
            streams[actor.number] = CudaStream.__new__(CudaStream)
            streams[actor.number]._start(actor)
        return streams[actor.number]

    @contextmanager
    def stream(chosen: CudaStream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before, recorder.current = recorder.current, chosen.actor
        try:
            yield
        finally:
            recorder.current = before

    def set_stream(chosen: CudaStream) -> None:
        recorder.current = chosen.actor

    def synchronize(*args: Any) -> None:
        counters.count_wait("synchronize")
        recorder.host_waits_for_device()

    return {
        "Stream": CudaStream,
        "ExternalStream": CudaStream,
        "Event": CudaEvent,
        "current_stream": lambda *args: of(recorder.current),
        "default_stream": lambda *args: of(recorder.default),
        "stream": stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
    }


def follow_works(recorder: RankRecorder) -> None:
    """Make the process groups' methods and their works tell the recorder what is waited for."""
    group: Any = c10d.ProcessGroup
    for name in _COLLECTIVES:
        if hasattr(group, name):  # torch 2.13 has new names for some
            setattr(group, name, _registered(getattr(group, name), recorder))
    for kind in (c10d.Work, c10d.FakeWork):
        replaced: Any = kind
        replaced.wait = _waited(kind.wait, recorder)
    number = [0]
    plain_batch = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        number[0] += 1
        recorder.batch = number[0]
        try:
            return plain_batch(p2p_op_list)
        finally:
            recorder.batch = 0

    for module in (dist, distributed_c10d):
        replaced = module
        replaced.batch_isend_irecv = batch_isend_irecv


def _registered(plain: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    @functools.wraps(plain)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = next((x for x in args if hasattr(x, "reduceOp")), None)
        recorder.reduction = "" if options is None else _name(options.reduceOp)
        work = plain(self, *args, **kwargs)
        recorder.register(work)
        return work

    return start


def _name(reduction: Any) -> str:
    """``SUM``, ``AVG``, ``MAX``, ..."""
    return next(name for name in _REDUCTIONS if reduction == getattr(dist.ReduceOp, name))


def _waited(plain: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wait(self: Any, *args: Any) -> Any:
        recorder.wait(self)
        return plain(self, *args)

    return wait
