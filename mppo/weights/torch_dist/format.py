"""Megatron's ``torch_dist`` checkpoint format: chunks of global tensors located by file offset.

A folder holds ``.metadata`` (torch.distributed.checkpoint's index: the chunks of every key, and the
byte range of the ``.distcp`` file that holds each), ``metadata.json``, ``common.pt`` and the
``.distcp`` files, in which every chunk is one ``torch.save`` archive.
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mppo.safety.input_error import InputError
from mppo.safety.input_files import open_file
from mppo.weights.hf.safetensors_file import StoredTensor, are_sizes
from mppo.weights.torch_dist.contents import METADATA, Chunk, GlobalTensor
from mppo.weights.torch_dist.pickles import OUTSIDE, Name, Record, read_pickle

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
_SAVED_TENSOR = {
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch": tuple(STORAGES),
    "collections": ("OrderedDict",),
}
"""The names in the pickle of a tensor."""
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COPY = "copy the checkpoint again"
MAX_PICKLE_BYTES = 1 << 16
"""Limit for the pickle of a chunk's archive: shape, strides and dtype of one tensor."""
FILES, MIN_FILE_BYTES, MAX_FILE_BYTES = 16, 64 << 20, 5 * 10**9


def locate(chunk: Chunk) -> StoredTensor:
    """Locate a chunk's data inside its archive; InputError if that is cut short or compressed, or
    holds no contiguous tensor of the chunk's shape."""
    try:
        with open_file(chunk.file) as stream:
            with zipfile.ZipFile(_Slice(stream, chunk)) as archive:
                names = {name.partition("/")[2]: name for name in archive.namelist()}
                pickled, data = archive.getinfo(names["data.pkl"]), archive.getinfo(names["data/0"])
                if data.compress_type or pickled.compress_type:
                    raise InputError("it is compressed")
                if pickled.file_size > MAX_PICKLE_BYTES:
                    raise InputError(f"its pickle has {pickled.file_size} bytes")
                saved = read_pickle(archive.read(pickled), _SAVED_TENSOR)
            begin = _data_begin(stream, data, chunk.archive_offset)
        dtype, first, shape = _contiguous(saved)
    except Exception as error:  # readers raise many types for a damaged archive
        raise InputError(
            f"{chunk.file}: unreadable chunk at byte {chunk.archive_offset} ({error}); {_COPY}"
        ) from error
    if shape != chunk.sizes:
        raise InputError(
            f"{chunk.file}: a chunk of shape {chunk.sizes} is stored as {shape}; {_COPY}"
        )
    begin += first * dtype.itemsize
    stored = StoredTensor(chunk.file, chunk.archive_offset + begin, dtype, shape)
    if begin + stored.nbytes > chunk.archive_bytes:
        raise InputError(
            f"{chunk.file}: the chunk at byte {chunk.archive_offset} is cut short; {_COPY}"
        )
    return stored


def _data_begin(stream: IO[bytes], member: zipfile.ZipInfo, archive: int = 0) -> int:
    """First byte of a member's data in its archive, which begins at byte ``archive``: behind zip's
    local header of 30 bytes, with the lengths of name and extra field in the last 4."""
    stream.seek(archive + member.header_offset + 26)
    lengths = stream.read(4)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return member.header_offset + 30 + name + extra


def _contiguous(saved: Any) -> tuple[torch.dtype, int, tuple[int, ...]]:
    """Return dtype, first element and shape of a pickled tensor; InputError for anything else."""
    none: tuple[Any, ...] = (None,) * 4
    is_tensor = type(saved) is Record and saved.name == "_rebuild_tensor_v2"
    storage, first, shape, stride = saved.arguments[:4] if is_tensor else none
    outside = storage.arguments[0] if type(storage) is Record else None
    kind = outside[1] if type(outside) is tuple and storage.name == OUTSIDE else None
    dtype = STORAGES.get(kind.name) if type(kind) is Name else None
    sizes = type(shape) is type(stride) is tuple and are_sizes([first, *shape, *stride])
    if dtype is None or not sizes or len(shape) != len(stride):
        raise InputError("it holds no tensor")
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            raise InputError(f"its tensor of shape {shape} is not contiguous: {stride}")
        expected *= size
    return dtype, first, shape


class _Slice(io.RawIOBase):
    def __init__(self, stream: IO[bytes], chunk: Chunk) -> None:
        self._stream, self._begin, self._size = stream, chunk.archive_offset, chunk.archive_bytes
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._position
        self._stream.seek(self._begin + self._position)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


@lru_cache(maxsize=4096)
def archive_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes before and after a tensor's data in its ``torch.save`` archive."""
    with tempfile.TemporaryFile() as stream:
        tensor = torch.empty(shape, dtype=dtype)
        with torch.serialization.skip_data():
            torch.save(tensor, stream)
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            info = next(i for i in archive.infolist() if i.filename.endswith("/data/0"))
        begin = _data_begin(stream, info)
        stream.seek(0)
        head = stream.read(begin)
        stream.seek(begin + tensor.nbytes)
        return head, stream.read()


def write_metadata(
    folder: Path,
    tensors: Mapping[str, GlobalTensor],
    objects: Mapping[str, tuple[Path, int, int]],
    common: dict[str, Any],
) -> None:
    """Write ``.metadata``, ``metadata.json``, ``common.pt``; objects: file, offset, length."""
    state, storage = {}, {}
    for key, tensor in tensors.items():
        boxes = [
            ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks
        ]
        properties = TensorProperties(dtype=tensor.dtype)
        state[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        for i, chunk in enumerate(tensor.chunks):
            index = MetadataIndex(key, torch.Size(chunk.offsets), i)
            relative = str(chunk.file.relative_to(folder))
            storage[index] = _StorageInfo(relative, chunk.archive_offset, chunk.archive_bytes)
    for key, (file, offset, length) in objects.items():
        state[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(str(file.relative_to(folder)), offset, length)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
    metadata = Metadata(state_dict_metadata=state, planner_data=None, storage_data=storage)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def file_bytes(total: int) -> int:
    """Return the size of a checkpoint's files: sixteen files, or more files of 5 GB. Only one
    process at a time can write to a file, so parallel writers need several files."""
    return min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, total // FILES))


class ChunkFiles:
    """Assigns places in ``.distcp`` files of at most ``max_file_bytes``, unless a single chunk is
    larger; the first file begins with an empty object."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder, self._max = folder, max_file_bytes
        buffer = io.BytesIO()
        torch.save([None], buffer)
        self._nothing = buffer.getvalue()
        self._sizes = [len(self._nothing)]

    def take(self, nbytes: int) -> tuple[Path, int]:
        if self._sizes[-1] and self._sizes[-1] + nbytes > self._max:
            self._sizes.append(0)
        begin = self._sizes[-1]
        self._sizes[-1] += nbytes
        return self._file(len(self._sizes) - 1), begin

    def _file(self, number: int) -> Path:
        return self._folder / f"__{number}_0.distcp"

    def empty_object_place(self) -> tuple[Path, int, int]:
        return self._file(0), 0, len(self._nothing)

    def files(self) -> dict[Path, tuple[bytes, int]]:
        """Return every file with the bytes at its start and its size."""
        return {
            self._file(i): (self._nothing if i == 0 else b"", size)
            for i, size in enumerate(self._sizes)
        }
