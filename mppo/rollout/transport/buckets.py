"""A weight bucket in memory that an SGLang server can read.

SGLang calls the format a flattened bucket: one byte tensor, and the name, dtype, shape and place of
each tensor in it. The byte tensor is in shared memory (CPU) or device memory (CUDA IPC); the HTTP
request carries a handle to it.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from mppo.parallel.device import exportable_memory
from mppo.rollout.transport.checked_load import BYTES, TABLE, bucket_table, tensor_checksum
from mppo.safety.temporary import SHARED_MEMORY, note
from mppo.weights.bucket import ALIGNMENT, BucketLayout, WeightBucket


@contextmanager
def _shared_by_file_name() -> Iterator[None]:
    """Share CPU tensors by file name: torch's default passes file descriptors, which works only
    between a process and its children."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)


def _shared(tensor: Tensor) -> Tensor:
    """Move a tensor into shared memory, which is removed even after a SIGKILL."""
    with _shared_by_file_name():
        tensor.share_memory_()
    manager, name, _ = tensor.untyped_storage()._share_filename_cpu_()
    note(SHARED_MEMORY / os.path.basename(name.decode()))
    note(Path(manager.decode()).parent)
    return tensor


class SharedBuffer:
    """Shared memory that holds one bucket at a time; it is reused, and grows to the largest bucket.
    ``layout`` is empty after ``fill_bytes``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0
        self.layout = BucketLayout((), 0)

    @property
    def content(self) -> Tensor:
        """The bytes in use: uint8."""
        return self._bytes[: self._used]

    def fill(self, bucket: WeightBucket) -> None:
        self.fill_bytes([bucket.content])
        self.layout = bucket.layout

    def fill_bytes(self, parts: Sequence[Tensor]) -> list[int]:
        """Copy uint8 tensors into the buffer, end to end; return the first byte of each. Every
        length but the last is a multiple of 16."""
        begins, total = [], 0
        for part in parts:
            begins.append(total)
            total += len(part)
        self._reserve(max(total, ALIGNMENT))  # torch makes no handle to an empty tensor
        for begin, part in zip(begins, parts, strict=True):
            self._bytes[begin : begin + len(part)].copy_(part)
        self._used, self.layout = total, BucketLayout((), 0)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # before another process reads the buffer
        return begins

    def _reserve(self, size: int) -> None:
        if size <= self._bytes.numel():
            return
        # free the smaller buffer first: both together may not fit
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._device.type != "cpu":
            with exportable_memory():
                self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
            return
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < size:
            raise RuntimeError(
                f"{SHARED_MEMORY} has no room for a weight bucket of {size >> 20} MiB: lower "
                "rollout.sync_bucket_mb, give the container more shared memory, or set "
                "rollout.sync=distributed"
            )
        self._bytes = _shared(torch.empty(size, dtype=torch.uint8))

    def payload(self) -> str:
        """A handle to the bucket in SGLang's own format, base64 of a pickle. It can be opened once:
        each reading process needs its own."""
        metadata = [
            SimpleNamespace(
                name=place.name,
                shape=place.shape,
                dtype=place.dtype,
                start_idx=place.start,
                end_idx=place.end,
                numel=place.end - place.start,
            )
            for place in self.layout.places
        ]
        return _pickled({"flattened_tensor": _Handle(self.content), "metadata": metadata})

    def own_payload(self, report: Path, single_rank: bool, checked: bool) -> str:
        """A handle to the bucket for ``checked_load``, see its ``bucket_table``; ``checked``: with
        checksums."""
        checksums = None
        if checked:
            content, places = self.content, self.layout.places
            checksums = [tensor_checksum(content[place.start : place.end]) for place in places]
        return self.described_payload(bucket_table(self.layout, checksums, report, single_rank))

    def described_payload(self, table: Tensor) -> str:
        """A handle to the buffer for one of mppo's loaders, with the table that it reads (uint8,
        CPU)."""
        _shared(table)
        return _pickled([(BYTES, _Handle(self.content)), (TABLE, _Handle(table))])


def _pickled(content: object) -> str:
    stream = io.BytesIO()
    with _shared_by_file_name():
        ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getbuffer()).decode("ascii")


class _Handle:
    """Pickles as torch's handle to a shared tensor; a CUDA device is given by its UUID, as SGLang
    expects, since device numbers differ between processes that see different devices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple:
        rebuild, reduced = reductions.reduce_tensor(self._tensor)
        arguments = cast("tuple[Any, ...]", reduced)  # those of rebuild_cuda_tensor on a GPU
        if self._tensor.device.type != "cpu":
            before, number, after = arguments[:6], arguments[6], arguments[7:]
            module = torch.get_device_module(self._tensor.device)
            arguments = (*before, str(module.get_device_properties(number).uuid), *after)
        return rebuild, arguments
