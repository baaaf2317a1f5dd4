"""Headers of safetensors files: reading, writing, and the file offsets of tensors.

A file is 8 bytes of header length, a JSON header, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from mppo.safety.input_error import InputError
from mppo.safety.input_files import open_file, parse_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS, MAX_SIZE = 16, 1 << 48
"""Limits for the dimensions of a tensor, and for a size or an offset; no file system holds more."""


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor's bytes: ``nbytes`` from ``offset`` in ``file``, row-major."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the places of all tensors of one file.

    Raises:
        InputError: the file is not safetensors, is shorter than its header says, or its header
            repeats a name or has overlapping tensors.
    """
    with open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise InputError(
                f"{file}: not a safetensors file, or cut short; put a good copy in its place"
            )
        try:
            header = parse_json(stream.read(length), unique=True)
            if not isinstance(header, dict):
                raise InputError(f"a JSON {type(header).__name__}, not an object")
        except ValueError as error:
            raise InputError(
                f"{file}: unreadable safetensors header: {error}; put a good copy in its place"
            ) from error
    header.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
        if stored.nbytes and stored.offset < end:
            raise InputError(
                f"{file}: {name} overlaps another tensor; put a good copy in its place"
            )
        end = max(end, stored.offset + stored.nbytes)
        if end > size:
            raise InputError(
                f"{file}: cut short: {name} ends at byte {end}, the file has {size}; "
                "put a good copy in its place"
            )
    return tensors


def _stored(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, places = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not are_sizes(shape) or not are_sizes(places) or len(places) != 2:
        raise InputError(
            f"{file}: {name} has shape {_shown(shape)} at {_shown(places)}: not integers "
            "from 0 on; replace it with an intact copy"
        )
    if not isinstance(kind, str) or kind not in DTYPES:
        raise InputError(f"{file}: {name} has dtype {_shown(kind)}, which is not supported")
    stored = StoredTensor(file, begin + places[0], DTYPES[kind], tuple(shape))
    if stored.nbytes != places[1] - places[0]:
        given = places[1] - places[0]
        raise InputError(
            f"{file}: {name} has {given} bytes, but its shape and dtype need {stored.nbytes}; put "
            "a good copy in its place"
        )
    return stored


def are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of integers that can be sizes or offsets of a tensor."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= MAX_DIMS
        and all(type(number) is int and 0 <= number < MAX_SIZE for number in numbers)
    )


def read_at(descriptor: int, into: memoryview, offset: int, file: Path) -> None:
    """Fill ``into`` from an open file; InputError if the file is cut short."""
    done = 0
    while done < len(into):
        read = os.preadv(descriptor, [into[done:]], offset + done)
        if read <= 0:
            raise InputError(f"{file}: cut short while reading")
        done += read


def byte_view(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes. ``Tensor.numpy`` would forbid that the
    tensor's memory is ever freed in place."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    content = (ctypes.c_ubyte * len(flat)).from_address(flat.data_ptr())
    vars(content)["tensor"] = flat  # lives as long as the view
    return memoryview(content).cast("B")


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def make_header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], file: Path
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Build the header of a new file: the bytes before the data (their number is a multiple of 8),
    and the places by name, in the order of ``tensors``."""
    entries: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    places = {
        name: StoredTensor(file, len(head) + entries[name]["data_offsets"][0], dtype, shape)
        for name, (dtype, shape) in tensors.items()
    }
    return head, places
