"""One bucket of weights as one piece of memory another process can read.

SGLang calls this a flattened bucket: one byte tensor, and for each tensor its name, type, shape and
place. The byte tensor lives in shared memory (CPU) or device memory (CUDA IPC); what travels over
HTTP is a handle to it.
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

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from mppo.rollout.engine import WeightBucket
from mppo.rollout.transport.checked_load import (
    BYTES,
    TABLE,
    BucketEntry,
    bucket_table,
    tensor_checksum,
)
from mppo.safety.temporary import SHARED_MEMORY, note

ALIGNMENT = 16
_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


@contextmanager
def _shared_by_file_name() -> Iterator[None]:
    """Share CPU tensors by file name inside: the default hands over descriptors, which only works
    between a process and its own children."""
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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def places(bucket: WeightBucket) -> tuple[list[int], int]:
    """Where each tensor goes in a flat buffer.

    Returns:
        Byte offsets, 16-byte aligned, and the total.
    """
    offsets, total = [], 0
    for _, tensor in bucket:
        offsets.append(total)
        total += _aligned(tensor.nbytes)
    return offsets, total


def _span(bucket: WeightBucket) -> tuple[Tensor, list[int]] | None:
    """The bytes that hold a bucket already laid out in one storage, and each tensor's offset."""
    storage = bucket[0][1].untyped_storage()
    offsets = []
    for _, tensor in bucket:
        if tensor.untyped_storage().data_ptr() != storage.data_ptr() or not tensor.is_contiguous():
            return None
        offsets.append(tensor.storage_offset() * tensor.element_size())
    begin = min(offsets)
    if any((offset - begin) % ALIGNMENT for offset in offsets):
        return None
    end = max(o + t.nbytes for o, (_, t) in zip(offsets, bucket, strict=True))
    held = sum(tensor.nbytes for _, tensor in bucket)
    if end - begin > held + ALIGNMENT * len(bucket):
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=bucket[0][1].device)
    flat = flat.set_(storage, begin, (end - begin,))
    return flat, [offset - begin for offset in offsets]


class SharedBuffer:
    """Memory that one bucket at a time is copied into, kept and grown over a run.

    Args:
        device: where the trainer's tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._rows: list[tuple[str, tuple[int, ...], torch.dtype, int, int]] = []
        self._used = 0

    def fill(self, bucket: WeightBucket) -> None:
        """Copy a bucket in; one copy where its tensors share one storage."""
        span = _span(bucket)
        offsets, total = (span[1], span[0].numel()) if span else places(bucket)
        self._reserve(total)
        if span:
            self._bytes[:total].copy_(span[0])
        else:
            for offset, (_, tensor) in zip(offsets, bucket, strict=True):
                flat = tensor.detach().contiguous().flatten().view(torch.uint8)
                self._bytes[offset : offset + flat.numel()].copy_(flat)
        self._used = total
        self._rows = [
            (name, tuple(tensor.shape), tensor.dtype, offset, offset + tensor.nbytes)
            for offset, (name, tensor) in zip(offsets, bucket, strict=True)
        ]
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def fill_bytes(self, parts: Sequence[Tensor]) -> list[int]:
        """Copy bytes in, end to end.

        Args:
            parts: uint8, their lengths multiples of 16 or the last.

        Returns:
            Where each begins.
        """
        begins, total = [], 0
        for part in parts:
            begins.append(total)
            total += len(part)
        self._reserve(max(total, ALIGNMENT))  # a handle needs some memory to name
        for begin, part in zip(begins, parts, strict=True):
            self._bytes[begin : begin + len(part)].copy_(part)
        self._used, self._rows = total, []
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return begins

    def _reserve(self, size: int) -> None:
        if size <= self._bytes.numel():
            return
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._device.type != "cpu":
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
        """A handle to the bucket, in SGLang's form, for one reading process: base64 of a pickle.

        Each reader needs one of its own.
        """
        metadata = [
            SimpleNamespace(
                name=name,
                shape=shape,
                dtype=dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
            for name, shape, dtype, start, end in self._rows
        ]
        return _pickled({"flattened_tensor": _Handle(self._content()), "metadata": metadata})

    def own_payload(self, report: Path, whole: bool, checked: bool) -> str:
        """The same for ``mppo.rollout.transport.checked_load``.

        Args:
            report: file for what the server finds wrong.
            whole: the server is one rank.
            checked: whether it is to verify what it gets and loads.
        """
        flat = self._content()
        entries = [
            BucketEntry(
                name,
                str(dtype).removeprefix("torch."),
                shape,
                start,
                end,
                tensor_checksum(flat[start:end]) if checked else None,
            )
            for name, shape, dtype, start, end in self._rows
        ]
        return self.described_payload(bucket_table(entries, report, whole))

    def described_payload(self, described: Tensor) -> str:
        """The same for a loader of mppo's that reads what is in the buffer from a table.

        Args:
            described: uint8 on the CPU.
        """
        _shared(described)
        return _pickled([(BYTES, _Handle(self._content())), (TABLE, _Handle(described))])

    def _content(self) -> Tensor:
        return self._bytes[: self._used]


def _pickled(content: object) -> str:
    stream = io.BytesIO()
    with _shared_by_file_name():
        ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getbuffer()).decode("ascii")


class _Handle:
    """Pickles as torch's own handle to a shared tensor.

    A CUDA device is named by its UUID, as SGLang's receiver expects: device numbers differ between
    processes that see different devices.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.device.type != "cpu":
            number = arguments[_DEVICE_ARGUMENT]
            uuid = str(
                torch.get_device_module(self._tensor.device).get_device_properties(number).uuid
            )
            arguments = (
                *arguments[:_DEVICE_ARGUMENT],
                uuid,
                *arguments[_DEVICE_ARGUMENT + 1 :],
            )
        return rebuild, arguments


def by_dtype(bucket: WeightBucket) -> Iterator[tuple[WeightBucket, Tensor]]:
    """A bucket's tensors of one type each, with their bytes end to end.

    A receiver that lays tensors end to end itself can then view them without misalignment.
    """
    kinds: dict[torch.dtype, WeightBucket] = {}
    for name, tensor in bucket:
        kinds.setdefault(tensor.dtype, []).append((name, tensor))
    for part in kinds.values():
        yield part, torch.cat([t.detach().flatten().view(torch.uint8) for _, t in part])


def dtype_names(bucket: WeightBucket) -> Sequence[str]:
    """Torch's short names of the tensors' types, such as ``bfloat16``."""
    return [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
