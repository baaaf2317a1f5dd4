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
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling

from mppo.weights.conversion import model_prefix
from mppo.weights.output_folder import check_free, partial_path, publish
from mppo.weights.torch_dist import COMPANIONS, LATEST, checkpoint_folder, read_checkpoint

VALUE_HEAD = "value_head.weight"


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Whether a path holds a ``torch_dist`` checkpoint rather than a Hugging Face folder."""
    path = Path(path)
    return not (path / "config.json").exists() and (
        (path / ".metadata").exists() or (path / LATEST).exists()
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


def load_megatron(path: str | Path, chunks: Sequence[Any]) -> tuple[str, ...]:
    """Fill a role's parameters; collective over all ranks.

    Args:
        path: a checkpoint folder, or the folder of iterations above it.
        chunks: this rank's ``GPTModel`` chunks.

    Returns:
        Parameters left as initialised: a value head the checkpoint does not have.

    Raises:
        ValueError: no such checkpoint, or it lacks parameters.
    """
    folder = checkpoint_folder(Path(path))
    prefix = model_prefix(read_checkpoint(folder))
    wanted = _sharded(chunks)
    add_prefix_for_sharding(wanted, prefix)
    # Megatron calls "unexpected" what is asked for and not in the checkpoint.
    loaded, _, absent_keys = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    lost = sorted(k.removeprefix(prefix) for k in absent_keys if "_extra_state" not in k)
    fresh = tuple(key for key in lost if key == VALUE_HEAD)
    if len(lost) > len(fresh):
        raise ValueError(f"{folder}: lacks {len(lost)} parameters, such as {lost[0]}")
    for number, chunk in enumerate(chunks):
        absent, unexpected = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
        names = [*absent, *unexpected]
        wrong = [n for n in names if not n.endswith("_extra_state") and n not in fresh]
        if wrong:
            raise ValueError(f"{folder}: does not fit the model: {', '.join(wrong[:5])}")
    return fresh


def companion_folder(path: str | Path) -> Path:
    """The folder with config.json and tokenizer of a Hugging Face folder or a checkpoint.

    Raises:
        ValueError: a checkpoint without them.
    """
    path = Path(path)
    if not is_megatron_checkpoint(path):
        return path
    for beside in (path / COMPANIONS, checkpoint_folder(path).parent / COMPANIONS):
        if (beside / "config.json").exists():
            return beside
    raise ValueError(
        f"{path}: no {COMPANIONS}/config.json beside the checkpoint; put the model's config.json "
        "and tokenizer there"
    )


def _sharded(chunks: Sequence[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
