"""The optimizer's moments in a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def saved_moments(role: Path) -> dict[str, torch.Tensor]:
    """The moments of a role's folder, complete, by parameter."""
    reader = FileSystemReader(role)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith("optimizer.state.exp_avg") and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        load(state, storage_reader=reader, no_dist=True)
    return state
