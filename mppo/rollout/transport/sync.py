"""Ways of bringing a stream of weights to SGLang servers.

A route is opened, takes buckets one by one, and is closed; every rank does this in step, and only
some ranks have servers to talk to. While a server loads one bucket the next is produced and copied.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import distributed_c10d

from mppo.parallel.addresses import free_port
from mppo.parallel.collectives import all_gather_objects
from mppo.rollout.engine import WeightBucket
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.transport.buckets import SharedBuffer, by_dtype, dtype_names
from mppo.rollout.transport.checked_load import LOADER

_POLL_S = 0.0005
_MOST_SERVERS = 256


class WeightTransport(Protocol):
    """A way to the servers.

    A server's failure does not stop the stream, which is collective: it is kept until ``close``.
    """

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """Begin an update of these servers (those this rank talks to; maybe none)."""
        ...

    def send(self, bucket: WeightBucket) -> None:
        """Take one bucket; it may be in flight until the next call but one."""
        ...

    def close(self) -> None:
        """Wait until all is loaded and end the update.

        Raises:
            ServerLost: a server is gone; the others may hold part of the weights.
            Exception: whatever else went wrong since ``open``.
        """
        ...

    def stop(self) -> None:
        """Give back everything held."""
        ...


class TensorTransport:
    """Shared memory on one machine: servers read the trainer's memory (CUDA IPC on a GPU).

    Args:
        device: where the stream's tensors are.
        tensor_parallel: ranks of each server. On a GPU each reads from the training rank on its own
            device: the payloads of ``tensor_parallel`` neighbouring ranks go together.
        group: process group of those neighbours (GPU with tensor_parallel > 1 only).
        report: the servers are mppo's own and load by ``mppo.rollout.transport.checked_load``,
            which tells in this file what is wrong; None: servers of others.
        checked: have own servers verify what they get and load.
    """

    _loader = LOADER

    def __init__(
        self,
        device: torch.device,
        tensor_parallel: int,
        group: dist.ProcessGroup | None = None,
        report: Path | None = None,
        checked: bool = False,
    ) -> None:
        self._report, self._checked = report, checked
        self._device, self._tensor_parallel, self._group = device, tensor_parallel, group
        self._buffers = (SharedBuffer(device), SharedBuffer(device))
        self._in_flight: list[list[Future]] = [[], []]
        self._servers: Mapping[int, SGLangApi] = {}
        self._version = 0
        self._turn = 0
        self._failure: Exception | None = None
        # one thread: a server takes its buckets one at a time anyway
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """See ``WeightTransport``."""
        self._servers, self._version, self._turn, self._failure = servers, version, 0, None
        self._in_flight = [[], []]
        self._try(lambda: [api.begin_update() for api in servers.values()])

    def _try(self, step: Callable[[], object]) -> None:
        """Do a step unless one failed before; keep its failure."""
        if self._failure is None:
            try:
                step()
            except Exception as error:
                self._failure = error

    def send(self, bucket: WeightBucket) -> None:
        """See ``WeightTransport``."""
        if not self._servers and self._group is None:
            return
        turn, self._turn = self._turn, 1 - self._turn
        self._try(lambda: self._wait(turn))
        self._try(lambda: self._buffers[turn].fill(bucket))
        if self._group is not None:
            # the others fill their buffer of the last turn as soon as this exchange is over
            self._try(lambda: self._wait(1 - turn))
            mine = "" if self._failure else self._payload(turn)
            shared = all_gather_objects(mine, self._tensor_parallel, self._group)
        for api in self._servers.values():
            if self._failure is not None:
                return
            if self._group is None:
                shared = [self._payload(turn) for _ in range(self._tensor_parallel)]
            self._in_flight[turn].append(self._pool.submit(self._load, api, shared, self._version))

    def _payload(self, turn: int) -> str:
        buffer = self._buffers[turn]
        if self._report is None:
            return buffer.payload()
        return buffer.own_payload(self._report, self._tensor_parallel == 1, self._checked)

    def _load(self, api: SGLangApi, payloads: list[str], version: int) -> None:
        """Have one server load one bucket.

        Raises:
            RequestRefused: an own server found something wrong with it.
        """
        if self._report is None:
            api.update_from_tensor(payloads, version)
            return
        api.update_from_tensor(payloads, version, self._loader)
        if self._report.exists():
            found = self._report.read_text().strip()
            self._report.unlink()
            raise RequestRefused(f"{api.url}/update_weights_from_tensor: {found}")

    def _wait(self, turn: int) -> None:
        futures, self._in_flight[turn] = self._in_flight[turn], []
        for future in futures:
            future.result()

    def close(self) -> None:
        """See ``WeightTransport``."""
        for turn in (self._turn, 1 - self._turn):
            self._try(lambda turn=turn: self._wait(turn))
        self._try(lambda: [api.end_update() for api in self._servers.values()])
        if self._device.type != "cpu":  # device memory belongs to training between updates
            self._buffers = (SharedBuffer(self._device), SharedBuffer(self._device))
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """See ``WeightTransport``."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._buffers = (SharedBuffer(self._device), SharedBuffer(self._device))


class DistributedTransport:
    """One broadcast per bucket and type from the first training rank to all ranks of all servers.

    Args:
        device: where the stream's tensors are.
        backend: torch.distributed backend of the group.
        tensor_parallel: ranks of each server.
        address: name of this machine as the servers' machines know it.
        timeout_s: longest wait for the servers.
    """

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
        self._failure: Exception | None = None
        self._pool = ThreadPoolExecutor(_MOST_SERVERS, thread_name_prefix="weight-sync")

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """See ``WeightTransport``; ``servers`` are all servers on the sending rank, else none."""
        self._servers, self._version, self._failure = servers, version, None
        if not servers:
            return
        try:
            if [api.url for api in servers.values()] != [api.url for api in self._joined]:
                self._leave()
                self._join()
            self._ask_all(lambda api: api.begin_update())
        except Exception as error:
            self._failure = error

    def _ask_all(self, call: Callable[[SGLangApi], object]) -> None:
        for future in [self._pool.submit(call, api) for api in self._servers.values()]:
            future.result()

    def _join(self) -> None:
        """Make the group: this rank is 0, servers' ranks follow in order."""
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
        self._group = make_group(self._backend, self._address, port, world, self._name, limit)
        for join in joins:
            join.result()
        self._joined = apis

    def send(self, bucket: WeightBucket) -> None:
        """See ``WeightTransport``."""
        if not self._servers or self._failure is not None:
            return
        try:
            for part, flat in by_dtype(bucket):
                self._broadcast(part, flat)
        except Exception as error:
            self._failure = error

    def _broadcast(self, part: WeightBucket, flat: Tensor) -> None:
        assert self._group is not None
        names, shapes = [name for name, _ in part], [list(tensor.shape) for _, tensor in part]
        loads = [
            self._pool.submit(
                api.update_from_distributed,
                names,
                dtype_names(part),
                shapes,
                self._name,
                self._version,
            )
            for api in self._servers.values()
        ]
        work = dist.broadcast(flat, 0, group=self._group, async_op=True)
        while not work.is_completed():
            for load in loads:
                if load.done():
                    load.result()  # a server that refused never joins the broadcast
            time.sleep(_POLL_S)
        work.wait()
        for load in loads:
            load.result()

    def close(self) -> None:
        """See ``WeightTransport``."""
        if self._servers and self._failure is None:
            try:
                self._ask_all(lambda api: api.end_update())
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            self._leave()
            raise self._failure

    def _leave(self) -> None:
        """End the group here and on every server that still answers."""
        group, joined = self._group, self._joined
        self._group, self._joined = None, ()
        if group is None:
            return
        for api in joined:
            if api.is_up():
                api.leave_group(self._name)
        dist.destroy_process_group(group)

    def stop(self) -> None:
        """See ``WeightTransport``."""
        self._group, self._joined = None, ()
        self._pool.shutdown(wait=False, cancel_futures=True)


class DiskTransport:
    """A Hugging Face folder that the first rank writes and every server reads.

    Args:
        folder: where; the servers' machines must see it under the same path.
        hf_folder: model folder whose config and tokenizer files go along.
        writes: whether this rank writes.
    """

    def __init__(self, folder: Path, hf_folder: Path, writes: bool) -> None:
        self._root, self._hf_folder, self._writes = folder, hf_folder, writes
        self._version = 0
        self._index: dict[str, str] = {}
        self._bytes = 0

    @property
    def folder(self) -> Path:
        """Folder of the version being written."""
        return self._root / f"version_{self._version}"

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """See ``WeightTransport``."""
        self._version, self._index, self._bytes = version, {}, 0
        if not self._writes:
            return
        shutil.rmtree(self._root, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for file in self._hf_folder.glob("*"):
            if file.suffix in (".json", ".model", ".txt", ".jinja") and "index" not in file.name:
                shutil.copy(file, self.folder)

    def send(self, bucket: WeightBucket) -> None:
        """See ``WeightTransport``."""
        if not self._writes:
            return
        shard = f"model-{len(set(self._index.values())) + 1:05d}.safetensors"
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}
        save_file(tensors, self.folder / shard, metadata={"format": "pt"})
        self._index.update(dict.fromkeys(tensors, shard))
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        """See ``WeightTransport``."""
        if self._writes:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._index}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index))

    def load(self, servers: Mapping[int, SGLangApi]) -> None:
        """Have servers read the folder, once every rank has closed the route."""
        for api in servers.values():
            api.update_from_disk(str(self.folder), self._version)

    def stop(self) -> None:
        """See ``WeightTransport``; the folder is needed no longer."""
        if self._writes:
            shutil.rmtree(self._root, ignore_errors=True)


def make_group(
    backend: str, address: str, port: int, world: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Rank 0 of a process group with ranks of another program, beside the default group.

    ``torch.distributed.new_group`` only knows ranks of the default group; the servers make theirs
    by this same internal constructor, whose store keys must agree.
    """
    # under torchrun, torch's own rendezvous would look for the launcher's store at this address
    store = dist.TCPStore(address, port, world, is_master=True, timeout=timeout, multi_tenant=True)
    group, _ = distributed_c10d._new_process_group_helper(
        world,
        0,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world)}
    return group
