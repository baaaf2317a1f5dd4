"""Built stages to and from Megatron ``torch_dist`` checkpoints, in any layout.

Megatron's own distributed checkpointing does the work: a checkpoint saved in one layout loads in
any other. The layout's groups must be active.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from mppo.weights.output_folder import check_free, partial_path, publish
from mppo.weights.torch_dist import checkpoint_folder


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Whether a path holds a ``torch_dist`` checkpoint rather than a Hugging Face folder."""
    path = Path(path)
    return not (path / "config.json").exists() and (
        (path / ".metadata").exists() or (path / "latest_checkpointed_iteration.txt").exists()
    )


def save_megatron(folder: str | Path, chunks: Sequence[Any]) -> Path:
    """Save a role's parameters; collective over all ranks.

    Args:
        folder: the output, on a file system all ranks see; must not exist.
        chunks: this rank's ``GPTModel`` chunks.

    Returns:
        The folder.

    Raises:
        ValueError: the folder exists.
    """
    folder = Path(folder).absolute()
    check_free(folder)
    building = partial_path(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        building.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(chunks), str(building))
    dist.barrier()
    if dist.get_rank() == 0:
        publish(folder)
    dist.barrier()
    return folder


def load_megatron(path: str | Path, chunks: Sequence[Any]) -> None:
    """Fill a role's parameters; collective over all ranks.

    Args:
        path: a checkpoint folder, or the folder of iterations above it.
        chunks: this rank's ``GPTModel`` chunks.

    Raises:
        ValueError: no such checkpoint.
    """
    folder = checkpoint_folder(Path(path))
    loaded = dist_checkpointing.load(_sharded(chunks), str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"], strict=True)


def _sharded(chunks: Sequence[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
