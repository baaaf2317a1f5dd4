"""Transport of the weight stream to servers on any machine, by broadcast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # documented, missing in __all__
    distributed_c10d,
)

from mppo.parallel.addresses import free_port
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.weights.bucket import WeightBucket

T = TypeVar("T")

_POLL_S = 0.0005
_MOST_SERVERS = 256


class KeepsFailure:
    """Keeps the first failure of an update, whose stream goes on: producing it is collective."""

    _failure: Exception | None = None

    def _try(self, step: Callable[[], object]) -> None:
        """Run a step unless an earlier one failed."""
        if self._failure is None:
            try:
                step()
            except Exception as error:
                self._failure = error


class DistributedTransport(KeepsFailure):
    """Broadcasts weights from the first training rank to all ranks of all servers, one broadcast
    per bucket and dtype. ``address`` is this machine's, reachable from the servers' machines."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        tensor_parallel: int,
        address: str,
        timeout_s: float,
    ) -> None:
        self._device, self._backend, self._address = device, backend, address
        self._tensor_parallel, self._timeout_s = tensor_parallel, timeout_s
        self._servers: Mapping[int, SGLangApi] = {}
        self._joined: tuple[SGLangApi, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._version = 0
        self._pool = ThreadPoolExecutor(_MOST_SERVERS, thread_name_prefix="weight-sync")

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """See ``WeightTransport``. ``servers`` holds all servers on rank 0, none on other ranks."""
        self._servers, self._version, self._failure = servers, version, None
        if servers:
            self._try(self._begin)

    def _begin(self) -> None:
        if [api.url for api in self._servers.values()] != [api.url for api in self._joined]:
            self._leave()
            self._join()
        self._call_all(lambda api: api.begin_update())

    def _call_all(self, call: Callable[[SGLangApi], object]) -> None:
        for future in [self._pool.submit(call, api) for api in self._servers.values()]:
            future.result()

    def _join(self) -> None:
        """Create the group: this rank is rank 0, the servers' ranks follow in order."""
        apis = tuple(self._servers.values())
        world = 1 + self._tensor_parallel * len(apis)
        port, self._name = free_port(), f"mppo_weights_{time.time_ns()}"
        joins = [
            self._pool.submit(
                api.join_group,
                self._address,
                port,
                1 + place * self._tensor_parallel,
                world,
                self._name,
                self._backend,
            )
            for place, api in enumerate(apis)
        ]
        limit = timedelta(seconds=self._timeout_s)
        self._group = self._with_servers(
            lambda: make_group(self._backend, self._address, port, world, self._name, limit), joins
        )
        for join in joins:
            join.result()
        self._joined = apis

    def _with_servers(self, step: Callable[[], T], calls: Sequence[Future]) -> T:
        """Run a step that blocks until every server joins it by one of ``calls``; raises their
        errors, or RuntimeError after ``timeout_s``.

        The step runs in a thread, which is abandoned if a server fails or is late. The first
        broadcast blocks too: with NCCL it creates the communicator, which cannot be interrupted.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(step())
            except BaseException as error:  # raised below
                outcome.set_exception(error)

        threading.Thread(target=run, name="weight group", daemon=True).start()
        deadline = time.monotonic() + self._timeout_s
        while not outcome.done():
            for call in calls:
                if call.done():
                    call.result()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "rollout.sync=distributed: not every server joined the process group of the "
                    f"weights at {self._address} within {self._timeout_s:.0f} s "
                    "(rollout.request_timeout_s): look at the servers' logs, and check that they "
                    "reach that address (NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the "
                    "network)"
                )
            time.sleep(_POLL_S)
        return outcome.result()

    def send(self, bucket: WeightBucket) -> None:
        if self._servers:
            self._try(lambda: [self._broadcast(part) for part in bucket.by_dtype()])

    def _broadcast(self, part: WeightBucket) -> None:
        assert self._group is not None
        places = part.layout.places
        loads = [
            self._pool.submit(
                api.update_from_distributed,
                [place.name for place in places],
                [place.dtype_name for place in places],
                [place.shape for place in places],
                self._name,
                self._version,
            )
            for api in self._servers.values()
        ]
        group = self._group
        work = self._with_servers(
            lambda: dist.broadcast(part.content, 0, group=group, async_op=True), loads
        )
        assert work is not None, "async_op returns work on a member of the group"
        while not work.is_completed():
            for load in loads:
                if load.done():
                    load.result()  # raises if a server refused: it will not join the broadcast
            time.sleep(_POLL_S)
        work.wait()
        for load in loads:
            load.result()

    def close(self) -> None:
        if self._servers:
            self._try(lambda: self._call_all(lambda api: api.end_update()))
        if self._failure is not None:
            self._leave()
            raise self._failure

    def _leave(self) -> None:
        group, joined = self._group, self._joined
        self._group, self._joined = None, ()
        if group is None:
            return
        for api in joined:
            if api.is_up():
                api.leave_group(self._name)
        dist.destroy_process_group(group)

    def stop(self) -> None:
        self._group, self._joined = None, ()
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_group(
    backend: str, address: str, port: int, world: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a process group with processes of another program; this process is rank 0.

    ``torch.distributed.new_group`` accepts only ranks of the default group. The servers call the
    same internal constructor, so both sides use the same store keys.
    """
    # under torchrun, torch's own rendezvous would connect to the launcher's store at this address
    store = TCPStore(address, port, world, is_master=True, timeout=timeout, multi_tenant=True)
    group, _ = distributed_c10d._new_process_group_helper(
        world,
        0,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    group = cast("dist.ProcessGroup", group)  # only a rank outside the group gets a non-member here
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world)}
    return group
