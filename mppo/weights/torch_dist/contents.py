"""Reading and checking of a ``torch_dist`` checkpoint's ``.metadata``.

``.metadata`` lists the tensors, the chunks of each, and the byte range of the file that holds each
chunk. The reader accepts only strings, integers and dtypes, at the places where torch writes them.
``check_complete`` tells whether the chunks of a tensor fill what a model needs of it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mppo.safety.input_error import InputError
from mppo.safety.input_files import inside, read_file
from mppo.weights.hf.safetensors_file import are_sizes
from mppo.weights.torch_dist.pickles import Record, read_pickle

METADATA = ".metadata"
MAX_TABLE_BYTES = 2 << 30
MOST_CORNERS = 1 << 62
"""Most positions in a tensor, so that each is one 64-bit integer."""
_TABLE = ("state_dict_metadata", "storage_data")
_BESIDE = ("planner_data", "storage_meta", "version", "mcore_data", "all_local_plans")
"""Attributes of the metadata that are ignored."""


class Chunk(NamedTuple):
    """A box of a global tensor: offsets, sizes, and the place of its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    archive_offset: int
    archive_bytes: int


@dataclass(frozen=True)
class GlobalTensor:
    """A key of the checkpoint: global shape and the chunks that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class _Place(NamedTuple):
    file: Path
    offset: int
    nbytes: int


def read_checkpoint(folder: Path) -> dict[str, GlobalTensor]:
    """Read all tensor keys of a checkpoint, or one role's part of one, without running code that
    its metadata names.

    Objects other than tensors are separate pickles; they are left out, because nothing reads them.

    Raises:
        OSError: no such checkpoint.
        InputError: the metadata or a data file is invalid; the message names the file and the fix.
    """
    where = folder / METADATA
    data = read_file(where, MAX_TABLE_BYTES)
    try:
        table = _fields(read_pickle(data), ("Metadata", "MCoreMetadata"), _TABLE, _BESIDE)
        entries, stored = (table[name] for name in _TABLE)
        if type(entries) is not dict or type(stored) is not dict:
            raise pickle.UnpicklingError("it holds no tables")
        places = _places(folder, stored)
        found = {key: _tensor(key, entry, places) for key, entry in entries.items()}
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{where}: holds more than a checkpoint's metadata: {error}; "
            "use a checkpoint from a source you trust, or safetensors"
        ) from error
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _places(
    folder: Path, stored: dict[Any, Any]
) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
    """Read the place of each chunk and object by key and offsets; check it against the file."""
    files: dict[str, tuple[Path, int]] = {}
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    for index, info in stored.items():
        key, offsets = _index(index)
        fields = _fields(info, ("_StorageInfo",), ("relative_path", "offset", "length"),
                         ("transform_descriptors",))  # fmt: skip
        name, begin, nbytes = (fields[name] for name in ("relative_path", "offset", "length"))
        if fields.get("transform_descriptors"):
            raise pickle.UnpicklingError(f"{key} is compressed, which is not supported")
        if type(name) is str and name not in files:
            files[name] = _data_file(folder, name)
        if type(name) is not str or not are_sizes([begin, nbytes]):
            raise pickle.UnpicklingError(f"{key} has no valid byte range of a file")
        file, size = files[name]
        # a range beyond the file's end would fail only in the middle of a load
        if begin + nbytes > size:
            raise InputError(
                f"{file}: cut short: {key} ends at byte {begin + nbytes}, the file has {size}; "
                "copy the checkpoint again"
            )
        places[key, offsets] = _Place(file, begin, nbytes)
    return places


def _data_file(folder: Path, name: str) -> tuple[Path, int]:
    file = inside(folder, name)
    if not file.exists():
        raise InputError(f"{folder}: data file {name} is missing; copy the checkpoint again")
    if not file.is_file():
        raise InputError(f"{file}: is not a file; copy the checkpoint again")
    return file, file.stat().st_size


def _index(index: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(index, ("MetadataIndex",), ("fqn",), ("offset", "index"))
    key, offsets = fields["fqn"], fields.get("offset")
    if type(key) is not str or not (offsets is None or _is_shape(offsets)):
        raise pickle.UnpicklingError("an index of its storage names no key and offsets")
    return key, offsets


def _tensor(
    key: Any, entry: Any, places: dict[tuple[str, tuple[int, ...] | None], _Place]
) -> GlobalTensor | None:
    if type(key) is not str:
        raise pickle.UnpicklingError("a key is not a text")
    if type(entry) is Record and entry.name == "BytesStorageMetadata":
        _fields(entry, ("BytesStorageMetadata",), ())
        return None
    fields = _fields(entry, ("TensorStorageMetadata",), ("properties", "size", "chunks"))
    shape, dtype = fields["size"], _dtype(fields["properties"])
    if not _is_shape(shape) or type(fields["chunks"]) is not list:
        raise pickle.UnpicklingError(f"{key} has no shape and chunks")
    chunks = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, ("ChunkStorageMetadata",), ("offsets", "sizes"))
        offsets, sizes = box["offsets"], box["sizes"]
        within = (
            _is_shape(offsets)
            and _is_shape(sizes)
            and len(offsets) == len(sizes) == len(shape)
            and all(begin + size <= most for begin, size, most in zip(offsets, sizes, shape))
        )
        if not within or (key, offsets) not in places:
            raise pickle.UnpicklingError(f"a chunk of {key} exceeds it, or has no place in a file")
        chunks.append(Chunk(offsets, sizes, *places[key, offsets]))
    return GlobalTensor(shape, dtype, tuple(chunks))


def _dtype(properties: Any) -> torch.dtype:
    """Read the dtype of ``TensorProperties``: the first value of its state, a tuple."""
    known = type(properties) is Record and properties.name == "TensorProperties"
    state = properties.state if known else None
    if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
        raise pickle.UnpicklingError("a tensor has no dtype")
    return state[0]


def _is_shape(sizes: Any) -> bool:
    return type(sizes) is tuple and are_sizes(list(sizes))


def _fields(
    value: Any, names: Collection[str], needed: Collection[str], more: Collection[str] = ()
) -> dict[str, Any]:
    """Return the attributes of a record, and check that its class has no others."""
    if type(value) is not Record or value.name not in names:
        kind = value.name if type(value) is Record else type(value).__name__
        raise pickle.UnpicklingError(f"it holds a {kind} in the place of a {min(names)}")
    state = {} if value.state is None else value.state
    if value.arguments or type(state) is not dict or any(type(name) is not str for name in state):
        raise pickle.UnpicklingError(f"it builds a {value.name} of something else")
    odd = state.keys() - {*needed, *more}
    lacking = set(needed) - state.keys()
    if odd or lacking:
        how = f"has {min(odd)!r}" if odd else f"lacks {min(lacking)!r}"
        raise pickle.UnpicklingError(f"a {value.name} in it {how}")
    return state


def needed_shape(
    stored: tuple[int, ...], shape: tuple[int, ...], vocab: int | None = None
) -> tuple[int, ...] | None:
    """Return the shape of the part of a stored tensor that a model needs, from the first number on;
    None if it is too short, or of another shape. ``vocab`` are the rows without padding, for
    embeddings and output layers, which may be stored with another padding."""
    if vocab is None:
        return shape if stored == shape else None
    fits = len(stored) > 0 and stored[0] >= vocab and stored[1:] == shape[1:]
    return (vocab, *shape[1:]) if fits else None


def check_complete(name: str, tensor: GlobalTensor, needed: tuple[int, ...]) -> None:
    """Check that every number of a part of a tensor, from the first on, is in exactly one chunk,
    else InputError. The number of chunks over a point is a function of the point. It is 1 inside
    the part and 0 outside exactly if its mixed differences, which are the chunks' corners with
    alternating signs, are those of the part. So the cost is linear in the number of chunks."""
    total = math.prod(needed)
    if math.prod(size + 1 for size in needed) > MOST_CORNERS:
        raise InputError(f"{name}: a shape of {list(needed)} is too large")
    last = np.array(needed, dtype=np.int64)
    begin = _rows([chunk.offsets for chunk in tensor.chunks], last)
    end = np.minimum(begin + _rows([chunk.sizes for chunk in tensor.chunks], last), last)
    begin = np.minimum(begin, last)
    filled = int((end - begin).prod(axis=1).sum())
    if filled < total:
        raise InputError(
            f"{name}: its chunks hold {filled} of the {total} numbers that the model needs; copy "
            "the checkpoint again"
        )
    if filled > total or not _tile(begin, end, last):
        raise InputError(f"{name}: its chunks overlap; copy the checkpoint again")


def _rows(values: list[tuple[int, ...]], last: np.ndarray) -> np.ndarray:
    return np.array(values, dtype=np.int64).reshape(len(values), len(last))


def _tile(begin: np.ndarray, end: np.ndarray, last: np.ndarray) -> bool:
    """Return whether boxes ``[begin, end)`` fill ``[0, last)`` once; int64 ``[N, D]``, ``[D]``."""
    cut = ((begin != 0) | (end != last)).any(axis=0)  # other axes have no influence
    if not cut.any():
        return len(begin) == 1
    weights = np.ones(len(begin) + 1, dtype=np.int64)
    weights[-1] = -1  # the box that must be filled
    lower = np.vstack([begin, np.zeros_like(last)])[:, cut].T
    upper = np.vstack([end, last])[:, cut].T
    corners, signs = [], []
    for choice in product((False, True), repeat=len(lower)):
        corner = [high if up else low for up, low, high in zip(choice, lower, upper, strict=True)]
        corners.append(np.ravel_multi_index(corner, last[cut] + 1))
        signs.append(weights * (-1) ** sum(choice))
    _, numbers = np.unique(np.concatenate(corners), return_inverse=True)
    return not np.bincount(numbers, weights=np.concatenate(signs)).any()
