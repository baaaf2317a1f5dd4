"""Pickles of a checkpoint from elsewhere, read or looked at without running what they name.

A ``torch_dist`` checkpoint keeps its table of contents, ``.metadata``, as a pickle, and what is no
tensor as well. Loading one runs whatever it names. Here they are read by unpicklers that know the
table's own types only, and plain values.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
_DISTRIBUTED = "torch.distributed.checkpoint"
_TABLES = f"{_DISTRIBUTED}.metadata"
_TYPES: dict[str, tuple[str, ...]] = {
    _TABLES: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DISTRIBUTED}.filesystem": ("_StorageInfo",),
    f"{_DISTRIBUTED}.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}  # fmt: skip
_ALLOWED = {
    (module, name): (module, name) for module, names in _TYPES.items() for name in names
} | {
    ("pathlib._local", "PosixPath"): ("pathlib", "PosixPath"),
    # Megatron-Core's own subclasses, gone since 0.16, say nothing that is read here
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): (_TABLES, "Metadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): (
        f"{_DISTRIBUTED}.planner",
        "SavePlan",
    ),
}
"""What a table may name, and what it stands for here."""


class _Contents(pickle.Unpickler):
    """Reads a table of contents, and refuses to run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            module, name = _ALLOWED[module, name]
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_metadata(folder: Path) -> Any:
    """The table of contents of a ``torch_dist`` folder; nothing it names is run.

    Args:
        folder: a checkpoint, or one role's part of one.

    Returns:
        torch's ``Metadata``.

    Raises:
        ValueError: naming the file, what it holds instead, and the cure.
    """
    where = folder / METADATA
    try:
        contents = _Contents(io.BytesIO(where.read_bytes())).load()
        tables = (getattr(contents, name, None) for name in ("state_dict_metadata", "storage_data"))
        if not all(isinstance(table, dict) for table in tables):
            raise pickle.UnpicklingError(f"it holds a {type(contents).__name__}")
    except Exception as error:  # what a file of strangers makes of its reader
        raise _refusal(where, error) from error
    return contents


def check_pickles(folder: Path) -> None:
    """Make sure that loading a ``torch_dist`` folder runs no code it brings along.

    Args:
        folder: a checkpoint, or one role's part of one; the table of contents and every object that
            is no tensor are looked at.

    Raises:
        ValueError: naming the file, and what it would run.
    """
    contents = read_metadata(folder)
    for index, place in contents.storage_data.items():
        if not hasattr(contents.state_dict_metadata.get(index.fqn), "chunks"):
            where = folder / place.relative_path
            try:
                with where.open("rb") as stream:
                    stream.seek(place.offset)
                    torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
            except Exception as error:  # as above
                raise _refusal(where, error) from error


def _refusal(where: Path, error: Exception) -> ValueError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    lines = str(error).splitlines() or [repr(error)]
    told = f"it names {named[1]}" if named else lines[0]
    return ValueError(
        f"{where}: more than a table of contents and plain values: {told}; "
        "take a checkpoint from whom you trust, or safetensors"
    )
