"""Writing a checkpoint's files in the background.

Megatron plans which rank writes which shard, collectively and before training goes on; the tensors
are copied to host memory; a thread then writes them. No collective runs in the thread: each rank
leaves a note of its files in the folder, and the first rank's thread, once it has seen every note,
writes Megatron's metadata and the manifest and gives the folder its name. A checkpoint is thus
complete as soon as it is on disk, even if the next PPO step never ends.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    WriteResult,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

from mppo.checkpoint.folder import publish_checkpoint
from mppo.checkpoint.staging import HostBuffers, stand_alone
from mppo.parallel import device
from mppo.safety.disk import FileEntry, file_checksum, write_bytes

NOTES = ".notes"
_POLL_S = 0.05


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are untouched."""


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist strategy up to the plan; the writing is ours."""

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret) -> AsyncRequest:
        self.writer = writer
        self.metadata = save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


@dataclass
class PlannedShards:
    """This rank's part of one role's distributed checkpoint.

    Args:
        folder: the role's folder.
        writer: Megatron's writer, which knows how to finish the folder.
        metadata: of the whole checkpoint; on the first rank only.
        common: state that is not sharded; written by the first rank.
        buckets: one file each: (path, name, (byte items, tensor items)).
        buffers: for copies of tensors that training goes on to change; None where it waits.
    """

    folder: Path
    writer: filesystem_async.FileSystemWriterAsync
    metadata: object
    common: dict
    buckets: list
    buffers: HostBuffers | None
    staged: bool = field(default=False, init=False)

    def stage(self) -> None:
        """Bring the tensors, once, to host memory that training does not change."""
        if self.staged:
            return
        self.staged = True
        role = self.folder.name
        for _, _, (_, tensors) in self.buckets:
            tensors[:] = [_staged(role, *pair, self.buffers) for pair in tensors]
        device.synchronize()


def plan_shards(sharded_state: dict, folder: Path, buffers: HostBuffers | None) -> PlannedShards:
    """Decide who writes what; a GPU's tensors are brought to host memory. Collective.

    Args:
        sharded_state: Megatron sharded state dict.
        folder: exists and is empty.
        buffers: take copies of tensors that training goes on to change; None where it waits.
    """
    # Megatron would start a manager process for the results of its writer processes
    filesystem_async._results_queue = filesystem_async._results_queue or queue.SimpleQueue()
    strategy = _PlanOnly("torch_dist", 1, thread_count=2)
    sharded, common = save_preprocess(sharded_state, True)
    stand_alone(sharded)
    FullyParallelSaveStrategyWrapper(strategy).async_save(sharded, folder)
    buckets = [
        (path, name, (blobs, list(t))) for path, name, (blobs, t) in strategy.writer.write_buckets
    ]
    planned = PlannedShards(folder, strategy.writer, strategy.metadata, common, buckets, buffers)
    if device.is_cuda():
        planned.stage()
    return planned


def _staged(role: str, item, tensor: torch.Tensor, buffers: HostBuffers | None) -> tuple:
    if buffers is not None:
        return item, buffers.copy((role, item.index), tensor)
    return item, tensor.to("cpu", non_blocking=True)


class _CheckedStream:
    """A file that keeps the CRC-32 of what is written to it."""

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
        """Several items share the file; it is closed by whoever opened it."""


def _write_bucket(bucket) -> tuple[list[WriteResult], FileEntry]:
    path, name, (blobs, tensors) = bucket
    results = []
    with open(path, "wb", buffering=0) as raw:
        stream = _CheckedStream(raw)
        try:
            for item, data in [*blobs, *tensors]:
                how = (item, name, SerializationFormat.TORCH_SAVE)
                results.append(_write_item(_StorageWriterTransforms(), stream, data, *how))
        except RuntimeError as error:  # torch.save does not pass on what the file said
            raise stream.error or error from None
        os.fsync(raw.fileno())
    return results, FileEntry(stream.size, stream.crc32)


@dataclass
class SaveJob:
    """One rank's share of one checkpoint.

    Args:
        building: the folder under construction.
        final: its name when done.
        rank, world_size: of this process.
        shards: by role.
        contents: small files this rank writes, by path relative to ``building``.
        write_manifest: called on the first rank with the entries of all files.
        published: called on the first rank when the folder has its name.
        patience_s: how long the first rank waits for the others.
    """

    building: Path
    final: Path
    rank: int
    world_size: int
    shards: Mapping[str, PlannedShards]
    contents: Mapping[str, bytes]
    write_manifest: Callable[[dict[str, FileEntry]], None]
    published: Callable[[], None]
    patience_s: float
    seconds: float = 0.0
    error: BaseException | None = field(default=None, init=False)
    copied: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self) -> None:
        """Write this rank's files; on the first rank also finish the folder."""
        start = time.perf_counter()
        try:
            try:
                self._write()
            finally:
                if self.rank == 0:
                    self._finish()
        except Exception as error:  # told where training collects the save
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
            self._leave({"error": f"rank {self.rank}: {_describe(error)}"})
            raise SaveError(_describe(error)) from error
        finally:
            for planned in self.shards.values():
                planned.buckets = []
        listed = {name: [entry.size, entry.crc32] for name, entry in files.items()}
        self._leave({"error": None, "results": results, "files": listed})

    def _stage(self) -> None:
        try:
            for planned in self.shards.values():
                planned.stage()
        finally:
            self.copied.set()

    def _free_space(self) -> None:
        """Remove what this rank wrote, so that a full disk has room for the note."""
        for planned in self.shards.values():
            for path, *_ in planned.buckets:
                Path(path).unlink(missing_ok=True)

    def _leave(self, note: dict) -> None:
        """Write the note under another name first: a note is whole or not there."""
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
            planned.writer.finish(planned.metadata, results)
            files[f"{role}/.metadata"] = file_checksum(planned.folder / ".metadata")
            for name, content in _companions(planned.common).items():
                files[f"{role}/{name}"] = write_bytes(planned.folder / name, content)
        shutil.rmtree(self.building / NOTES)
        self.write_manifest(files)
        publish_checkpoint(self.building, self.final)
        self.published()

    def _wait_for_notes(self) -> list[dict]:
        deadline = time.monotonic() + self.patience_s
        paths = [self.building / NOTES / f"{rank}.json" for rank in range(self.world_size)]
        while missing := [path for path in paths if not path.exists()]:
            if time.monotonic() > deadline:
                raise SaveError(
                    f"{len(missing)} of {self.world_size} ranks left no note in {paths[0].parent} "
                    f"within {self.patience_s:.0f} s, first rank {missing[0].stem}: every node "
                    "must see trainer.default_local_dir on one shared file system"
                )
            time.sleep(_POLL_S)
        return [json.loads(path.read_text()) for path in paths]


class SaveThread:
    """Runs one save at a time in the background."""

    def __init__(self) -> None:
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: SaveJob) -> None:
        """Begin writing; the one before must have been waited for."""
        assert self._thread is None
        self._job = job
        self._thread = threading.Thread(target=job.run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether files are still being written by this rank."""
        return self._thread is not None and self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until the job under way, if any, needs the models no more."""
        if self._job is not None:
            self._job.copied.wait()

    def finished(self) -> SaveJob | None:
        """The job that ended since the last call, if any."""
        return None if self.busy else self.wait()

    def wait(self) -> SaveJob | None:
        """Wait for the job under way, if any, and return it."""
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
