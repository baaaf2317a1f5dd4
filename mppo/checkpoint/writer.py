"""Writing of a checkpoint's files in the background.

Megatron plans which rank writes which shard, collectively and before training continues; the
tensors are copied to host memory; a thread then writes them. The thread runs no collective: each
rank writes a note that lists its files to the folder, and when every note is there, the first
rank's thread writes Megatron's metadata and the manifest and renames the folder. A checkpoint is
therefore complete as soon as it is on disk, even if the next PPO step never ends.

All ranks see the same folder, so on several nodes it must lie on a shared file system.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from mppo.checkpoint.folder import Manifest, publish_checkpoint, write_manifest
from mppo.parallel import device
from mppo.safety.disk import FileEntry, file_checksum, write_bytes
from mppo.weights.hf.safetensors_file import byte_view

NOTES = ".notes"
_POLL_S = 0.05


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are unchanged."""


class HostBuffers:
    """Copies of tensors, in memory that is reused by the next save. Allocating memory would cost
    more than the copy: the system maps it page by page, and pins it page by page for a GPU to write
    to it. One save at a time may use the buffers."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host; the copy is complete after ``device.synchronize()``. ``key``
        identifies the tensor, the same in every save."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = not tensor.is_cpu
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist strategy without the writing: it keeps the plan."""

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret) -> AsyncRequest:
        self.writer = writer
        self.metadata = save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


@dataclass
class PlannedShards:
    """This rank's part of one role's distributed checkpoint. The first rank has ``metadata`` of all
    shards, and writes ``common``. Buckets are files: (path, name, (byte items, tensor items))."""

    folder: Path
    writer: filesystem_async.FileSystemWriterAsync
    metadata: Metadata | None
    common: dict
    buckets: list
    buffers: HostBuffers | None
    staged: bool = field(default=False, init=False)

    def stage(self) -> None:
        """Copy the tensors to host memory that training does not change, unless that is done. A
        save for which training waits needs no copy; its tensors need only be complete."""
        if self.staged:
            return
        self.staged = True
        role = self.folder.name
        if self.buffers is not None:
            for _, _, (_, tensors) in self.buckets:
                tensors[:] = [(i, self.buffers.copy((role, i.index), x)) for i, x in tensors]
        device.synchronize()


def plan_shards(sharded_state: dict, folder: Path, buffers: HostBuffers | None) -> PlannedShards:
    """Plan which rank writes which shard to an empty folder, and stage a GPU's tensors. Collective.
    ``buffers`` hold copies, as training continues during the save; None if it waits."""
    # Megatron would start a manager process to collect results from its writer processes
    filesystem_async._results_queue = filesystem_async._results_queue or queue.SimpleQueue()
    strategy = _PlanOnly("torch_dist", 1, thread_count=2)
    sharded, common = save_preprocess(sharded_state, True)
    assert isinstance(sharded, dict), "as sharded_state is"
    give_own_storages(sharded)
    FullyParallelSaveStrategyWrapper(strategy).async_save(sharded, folder)
    buckets = [
        (path, name, (blobs, list(t))) for path, name, (blobs, t) in strategy.writer.write_buckets
    ]
    planned = PlannedShards(folder, strategy.writer, strategy.metadata, common, buckets, buffers)
    if device.is_cuda():
        planned.stage()
    return planned


def give_own_storages(sharded_state: dict | list) -> None:
    """Give every host tensor a storage of exactly its own elements, over the same memory.
    torch.save writes a tensor's complete storage, so Megatron's writer copies any tensor that is
    part of a larger one. Nearly all optimizer states and parameters are."""
    for entry in nested_values(sharded_state):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            entry.data = _same_memory(entry.data)


def _same_memory(tensor: Tensor) -> Tensor:
    complete = tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize
    if complete or not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    own = torch.frombuffer(byte_view(octets), dtype=torch.uint8)
    return own.view(tensor.dtype).view(tensor.shape)


class _CheckedStream:
    """A binary file that computes size and CRC-32 of what is written, and keeps its error."""

    def __init__(self, stream) -> None:
        self._stream = stream
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += self._stream.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: several items share the file, and its opener closes it."""


def _write_bucket(bucket) -> tuple[list[WriteResult], FileEntry]:
    path, name, (blobs, tensors) = bucket
    results = []
    with open(path, "wb", buffering=0) as raw:
        stream = _CheckedStream(raw)
        try:
            for item, data in [*blobs, *tensors]:
                how = (item, name, SerializationFormat.TORCH_SAVE)
                target = cast("io.IOBase", stream)  # it has the methods that torch calls
                # tensors that were not staged come from the device one at a time
                content = data.cpu() if isinstance(data, torch.Tensor) else data
                results.append(_write_item(_StorageWriterTransforms(), target, content, *how))
        except RuntimeError as error:  # torch.save hides the file's own error
            raise stream.error or error from None
        os.fsync(raw.fileno())
    return results, FileEntry(stream.size, stream.crc32)


@dataclass
class SaveJob:
    """One rank's share of one checkpoint.

    Args:
        contents: small files that this rank writes, by path relative to ``building``.
        manifest: the manifest but for its files.
        published: called on the first rank when the folder has its final name.
        patience_s: seconds that the first rank waits for the notes of the others.
        error: why the save failed on this rank; None: it did not.
        copied: set when the save no longer reads the role's tensors.
    """

    building: Path
    final: Path
    rank: int
    world_size: int
    shards: Mapping[str, PlannedShards]
    contents: Mapping[str, bytes]
    manifest: Manifest
    published: Callable[[], None]
    patience_s: float
    seconds: float = 0.0
    error: BaseException | None = field(default=None, init=False)
    copied: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self) -> None:
        """Write this rank's files; on the first rank also complete the folder."""
        start = time.perf_counter()
        try:
            try:
                self._write()
            finally:
                if self.rank == 0:
                    self._finish()
        except Exception as error:  # Checkpointer reports it when it collects the save
            self.error = error
        self.seconds = time.perf_counter() - start

    def _write(self) -> None:
        results = {}
        files = {}
        try:
            self._stage()
            for name, content in self.contents.items():
                files[name] = write_bytes(self.building / name, content)
            for role, planned in self.shards.items():
                written = [_write_bucket(bucket) for bucket in planned.buckets]
                for bucket, (_, entry) in zip(planned.buckets, written):
                    files[f"{role}/{bucket[1]}"] = entry
                results[role] = [_pack(r) for items, _ in written for r in items]
        except Exception as error:
            self._free_space()
            self._write_note({"error": f"rank {self.rank}: {_describe(error)}"})
            raise SaveError(_describe(error)) from error
        finally:
            for planned in self.shards.values():
                planned.buckets = []
        listed = {name: [entry.size, entry.crc32] for name, entry in files.items()}
        self._write_note({"error": None, "results": results, "files": listed})

    def _stage(self) -> None:
        try:
            for planned in self.shards.values():
                planned.stage()
        finally:
            self.copied.set()

    def _free_space(self) -> None:
        """Delete this rank's files, so that a full disk has room for the note."""
        for planned in self.shards.values():
            for path, *_ in planned.buckets:
                Path(path).unlink(missing_ok=True)

    def _write_note(self, note: dict) -> None:
        """Write the note under a hidden name and rename it, so that no rank reads half a note."""
        hidden = self.building / NOTES / f".{self.rank}.json"
        write_bytes(hidden, json.dumps(note).encode())
        hidden.rename(self.building / NOTES / f"{self.rank}.json")

    def _finish(self) -> None:
        notes = self._wait_for_notes()
        errors = [note["error"] for note in notes if note["error"]]
        if errors:
            shutil.rmtree(self.building, ignore_errors=True)
            raise SaveError("; ".join(errors))
        files = {name: FileEntry(*entry) for note in notes for name, entry in note["files"].items()}
        for role, planned in self.shards.items():
            results = [[_unpack(r) for r in note["results"][role]] for note in notes]
            assert planned.metadata is not None, "the first rank has it"
            planned.writer.finish(planned.metadata, results)
            files[f"{role}/.metadata"] = file_checksum(planned.folder / ".metadata")
            for name, content in _companions(planned.common).items():
                files[f"{role}/{name}"] = write_bytes(planned.folder / name, content)
        shutil.rmtree(self.building / NOTES)
        write_manifest(self.building, replace(self.manifest, files=dict(sorted(files.items()))))
        publish_checkpoint(self.building, self.final)
        self.published()

    def _wait_for_notes(self) -> list[dict]:
        deadline = time.monotonic() + self.patience_s
        paths = [self.building / NOTES / f"{rank}.json" for rank in range(self.world_size)]
        while missing := [path for path in paths if not path.exists()]:
            if time.monotonic() > deadline:
                raise SaveError(
                    f"{len(missing)} of {self.world_size} ranks wrote no note to {paths[0].parent} "
                    f"within {self.patience_s:.0f} s, the first of them rank {missing[0].stem}: "
                    "trainer.default_local_dir must be on a file system that all nodes share"
                )
            time.sleep(_POLL_S)
        return [json.loads(path.read_text()) for path in paths]


class SaveThread:
    def __init__(self) -> None:
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: SaveJob) -> None:
        """Start a save; :meth:`wait` must have returned the previous one."""
        assert self._thread is None
        self._job = job
        self._thread = threading.Thread(target=job.run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until the save in progress, if any, no longer reads the models."""
        if self._job is not None:
            self._job.copied.wait()

    def finished(self) -> SaveJob | None:
        """The save that ended since the last call, if any."""
        return None if self.busy else self.wait()

    def wait(self) -> SaveJob | None:
        if self._thread is None:
            return None
        self._thread.join()
        job, self._thread, self._job = self._job, None, None
        return job


def _companions(common: dict) -> dict[str, bytes]:
    """Megatron's two small files beside the shards: unsharded state, and the format's name."""
    stream = io.BytesIO()
    torch.save(common, stream)
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
    return {"common.pt": stream.getvalue(), "metadata.json": config.encode()}


def _pack(result: WriteResult) -> list:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    where = [place.relative_path, place.offset, place.length]
    return [index.fqn, offset, index.index, result.size_in_bytes, where]


def _unpack(packed: list) -> WriteResult:
    fqn, offset, index, size, where = packed
    key = MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
    return WriteResult(index=key, size_in_bytes=size, storage_data=_StorageInfo(*where))


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
