"""Transports of a weight stream to SGLang servers: shared memory or a folder, and their choice.

A transport is opened, takes buckets one by one, and is closed. All ranks make these calls in the
same order, but only head ranks send requests to servers. While a server loads one bucket, the next
one is produced and copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mppo.parallel import device as device_seam
from mppo.parallel.addresses import LOOPBACK, address_towards, own_address
from mppo.parallel.collectives import all_gather_objects
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_options import HOST
from mppo.rollout.transport.broadcast import DistributedTransport, KeepsFailure
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.checked_load import LOADER
from mppo.weights.bucket import WeightBucket


class WeightTransport(Protocol):
    """A transport of weights to servers. Producing the stream is collective, so a server's failure
    does not stop it."""

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        """Begin an update of the servers for which this rank is the head (possibly none)."""
        ...

    def send(self, bucket: WeightBucket) -> None:
        """Send one bucket; the servers may still read it during the next call."""
        ...

    def close(self) -> None:
        """Wait until the servers have loaded every bucket, and end the update. Raises the first
        failure since ``open``; after ServerLost the other servers may hold part of the weights."""
        ...

    def stop(self) -> None:
        """Release memory, threads, groups and files."""
        ...


class TensorTransport(KeepsFailure):
    """Shared memory on one machine: servers read the trainer's memory (CUDA IPC on a GPU).

    Args:
        tensor_parallel: ranks of each server. On a GPU, each reads from the training rank on its
            own device: one request carries the payloads of ``tensor_parallel`` neighbouring ranks.
        report: file to which ``mppo.rollout.transport.checked_load`` in servers that mppo started
            writes errors; None: external servers, which load with SGLang's own loader.
        checked: servers that mppo started verify what they receive and load.
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
        # one thread: a server loads one bucket at a time
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        self._servers, self._version, self._turn, self._failure = servers, version, 0, None
        self._in_flight = [[], []]
        self._try(lambda: [api.begin_update() for api in servers.values()])

    def send(self, bucket: WeightBucket) -> None:
        if not self._servers and self._group is None:
            return
        turn, self._turn = self._turn, 1 - self._turn
        # this buffer may still be read by the load of the bucket before the last one
        self._try(lambda: self._wait(turn))
        self._try(lambda: self._buffers[turn].fill(bucket))
        shared: list[str] = []
        if self._group is not None:
            # after this exchange the other ranks refill the buffer of the previous turn, which this
            # rank's server may still be reading
            self._try(lambda: self._wait(1 - turn))
            mine = "" if self._failure else self._payload(turn)
            shared = all_gather_objects(mine, self._tensor_parallel, self._group)
        for api in self._servers.values():
            if self._failure is not None:
                return
            if self._group is None:  # a payload can be opened once: one for each rank
                shared = [self._payload(turn) for _ in range(self._tensor_parallel)]
            self._in_flight[turn].append(self._pool.submit(self._load, api, shared, self._version))

    def _payload(self, turn: int) -> str:
        buffer = self._buffers[turn]
        if self._report is None:
            return buffer.payload()
        return buffer.own_payload(self._report, self._tensor_parallel == 1, self._checked)

    def _load(self, api: SGLangApi, payloads: list[str], version: int) -> None:
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
        for turn in (self._turn, 1 - self._turn):
            self._try(lambda turn=turn: self._wait(turn))
        self._try(lambda: [api.end_update() for api in self._servers.values()])
        if self._device.type != "cpu":  # device memory belongs to training between updates
            self._buffers = (SharedBuffer(self._device), SharedBuffer(self._device))
            device_seam.collect_shared_memory()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._buffers = (SharedBuffer(self._device), SharedBuffer(self._device))


class DiskTransport:
    """A Hugging Face folder that the first rank writes and every server reads under the same path;
    config and tokenizer files are copied from ``hf_folder``."""

    def __init__(self, folder: Path, hf_folder: Path, writes: bool) -> None:
        self._root, self._hf_folder, self._writes = folder, hf_folder, writes
        self._version = 0
        self._index: dict[str, str] = {}
        self._bytes = 0

    @property
    def folder(self) -> Path:
        return self._root / f"version_{self._version}"

    def open(self, servers: Mapping[int, SGLangApi], version: int) -> None:
        self._version, self._index, self._bytes = version, {}, 0
        if not self._writes:
            return
        shutil.rmtree(self._root, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for file in self._hf_folder.glob("*"):
            if file.suffix in (".json", ".model", ".txt", ".jinja") and "index" not in file.name:
                shutil.copy(file, self.folder)

    def send(self, bucket: WeightBucket) -> None:
        if not self._writes:
            return
        shard = f"model-{len(set(self._index.values())) + 1:05d}.safetensors"
        on_host = WeightBucket(bucket.layout, bucket.content.cpu())
        # a copy of its own for each: save_file refuses tensors that share a storage
        tensors = {name: tensor.clone() for name, tensor in on_host}
        save_file(tensors, self.folder / shard, metadata={"format": "pt"})
        self._index.update(dict.fromkeys(tensors, shard))
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        if self._writes:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._index}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index))

    def load(self, servers: Mapping[int, SGLangApi]) -> None:
        """Make servers read the folder, after every rank has closed the transport."""
        for api in servers.values():
            api.update_from_disk(str(self.folder), self._version)

    def stop(self) -> None:
        if self._writes:
            shutil.rmtree(self._root, ignore_errors=True)


def make_transport(
    rollout: RolloutConfig,
    fleet: Fleet,
    device: torch.device,
    folder: Path,
    hf_folder: Path,
    rank: int,
    world: int,
) -> WeightTransport:
    """The transport of whole tensors that ``rollout.sync`` names; collective."""
    tensor_parallel = fleet.tensor_parallel
    if rollout.sync == "disk":
        return DiskTransport((folder / "weights").resolve(), hf_folder, writes=rank == 0)
    if rollout.sync == "distributed":
        return DistributedTransport(
            device,
            device_seam.weight_backend(),
            tensor_parallel,
            _address(rollout),
            rollout.request_timeout_s,
        )
    group = None
    if device.type != "cpu" and tensor_parallel > 1:
        # one group per server: the training ranks whose GPUs it shares; all ranks create all groups
        for first in range(0, world, tensor_parallel):
            ranks = list(range(first, first + tensor_parallel))
            made = cast("dist.ProcessGroup", dist.new_group(ranks))
            group = made if rank in ranks else group
    report = None
    if not rollout.urls:
        report = (folder / f"refused_{rank}.txt").resolve()
        report.unlink(missing_ok=True)
    checked = rollout.verify_sync == "checksum"
    return TensorTransport(device, tensor_parallel, group, report, checked)


def _address(rollout: RolloutConfig) -> str:
    """The address at which servers reach this rank: loopback if all are on this machine."""
    towards = {address_towards(urlsplit(url).hostname or HOST) for url in rollout.urls}
    if towards <= {LOOPBACK}:
        return HOST
    return towards.pop() if len(towards) == 1 else own_address()
