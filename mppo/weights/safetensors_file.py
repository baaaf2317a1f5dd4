"""The safetensors format: headers read and written, tensor data located by file offset.

A file is 8 bytes of header length, a JSON header, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie: ``nbytes`` from ``offset`` in ``file``, row-major."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        ValueError: the file is not safetensors, or is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size):
            raise ValueError(
                f"{file}: not a safetensors file, or cut short; put a good copy in its place"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: unreadable safetensors header ({error})") from error
    tensors, begin = {}, 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}, which is not known here")
        first, last = entry["data_offsets"]
        stored = StoredTensor(
            file, begin + first, DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        )
        if stored.nbytes != last - first:
            raise ValueError(f"{file}: {name} says {last - first} bytes, needs {stored.nbytes}")
        if begin + last > size:
            raise ValueError(
                f"{file}: cut short: {name} ends at byte {begin + last}, the file has {size}; "
                "put a good copy in its place"
            )
        tensors[name] = stored
    return tensors


def make_header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], file: Path
) -> tuple[bytes, dict[str, StoredTensor]]:
    """The header of a file to be written, and where each tensor goes.

    Args:
        tensors: dtype and shape by name, in the order the data will lie.
        file: the file's path.

    Returns:
        The bytes before the data (a multiple of 8 long), and the places.
    """
    entries, offset = {"__metadata__": {"format": "pt"}}, 0
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
