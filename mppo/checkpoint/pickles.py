"""Pickles of a checkpoint from elsewhere, looked at before torch's loaders run them.

A ``torch_dist`` checkpoint keeps its table of contents, ``.metadata``, as a pickle, and what is no
tensor as well. Loading one runs whatever it names. Here they are read by unpicklers that know the
table's own types only, and plain values.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

METADATA = ".metadata"
_TYPES = {
    metadata: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo",),
    planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
}  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,
} | {
    (module.__name__, name): getattr(module, name)
    for module, names in _TYPES.items()
    for name in names
    if hasattr(module, name)
}


class _Contents(pickle.Unpickler):
    """Reads a table of contents, and refuses to run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_pickles(folder: Path) -> None:
    """Make sure that loading a ``torch_dist`` folder runs no code it brings along.

    Args:
        folder: one role's, whole and with checksums that are right.

    Raises:
        ValueError: naming the file, and what it would run.
    """
    where = folder / METADATA
    try:
        contents = _Contents(io.BytesIO(where.read_bytes())).load()
        if not isinstance(contents, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(contents).__name__}")
        for index, place in contents.storage_data.items():
            if isinstance(contents.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                where = folder / place.relative_path
                with where.open("rb") as stream:
                    stream.seek(place.offset)
                    torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
    except Exception as error:  # what a file of strangers makes of its reader
        named = re.search(r"GLOBAL (\S+)", str(error))
        told = f"it names {named[1]}" if named else str(error).splitlines()[0] or repr(error)
        raise ValueError(
            f"{where}: more than a table of contents and plain values: {told}"
        ) from error
