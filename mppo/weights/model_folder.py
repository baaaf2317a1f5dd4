"""Folders of initial weights: a Hugging Face folder, or a Megatron ``torch_dist`` checkpoint.

This module examines paths only. The config.json and tokenizer of a checkpoint are in ``hf/`` beside
it, where the conversion tool puts them.
"""

from __future__ import annotations

from pathlib import Path

from mppo.safety.input_error import InputError
from mppo.safety.input_files import inside, read_text

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMPANIONS = "hf"
_VERL_COMPANIONS = "huggingface"
_VERL_SHARDS = "dist_ckpt"
LATEST_BYTES = 1 << 10
"""Size limit of ``LATEST``, which holds a number or a word."""


def is_megatron_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a ``torch_dist`` checkpoint rather than a Hugging Face folder."""
    path = Path(path)
    return not (path / "config.json").exists() and (
        (path / ".metadata").exists() or (path / LATEST).exists()
    )


def weights_folder(path: str | Path) -> Path:
    """The Hugging Face folder or checkpoint inside a role's folder of verl
    (``global_step_N/actor``); any other path itself.

    verl with Megatron writes ``huggingface/`` with config and tokenizer, and with the weights if it
    has a bridge, else ``dist_ckpt/`` beside it; since 2026 both are in ``model/``. InputError: the
    folder holds shards of FSDP, which only verl can merge.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    if any(path.glob("model_world_size_*_rank_*.pt")):
        raise InputError(
            f"{path}: shards that verl saved with FSDP; merge them with verl: python -m "
            f"verl.model_merger merge --backend fsdp --local_dir {path} --target_dir NEW_HF"
        )
    for parent in (path / "model", path):
        if any((parent / _VERL_COMPANIONS).glob("*.safetensors")):
            return parent / _VERL_COMPANIONS
        if (parent / _VERL_SHARDS / ".metadata").exists():
            return parent / _VERL_SHARDS
    return path


def checkpoint_folder(path: str | Path) -> Path:
    """``path`` or the latest iteration under it that has ``.metadata``; InputError without one."""
    path = Path(path)
    if (path / ".metadata").exists():
        return path
    if (path / LATEST).exists():
        latest = read_text(path / LATEST, LATEST_BYTES).strip()
        found = inside(path, f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
        if (found / ".metadata").exists():
            return found
        raise InputError(f"{path}: {LATEST} names {found.name}, which is not a checkpoint")
    raise InputError(
        f"{path}: not a torch_dist checkpoint (no .metadata and no {LATEST}); set the path to the "
        "folder that Megatron saved with --ckpt-format torch_dist"
    )


def companion_folder(path: str | Path) -> Path:
    """The folder with config.json and tokenizer of a Hugging Face folder or a checkpoint;
    InputError for a checkpoint without them."""
    path = Path(path)
    if not is_megatron_checkpoint(path):
        return path
    folder = checkpoint_folder(path)
    for name in (COMPANIONS, _VERL_COMPANIONS):
        for beside in (path / name, folder / name, folder.parent / name):
            if (beside / "config.json").exists():
                return beside
    raise InputError(
        f"{path}: no {COMPANIONS}/config.json beside the checkpoint; put the model's config.json "
        "and tokenizer there"
    )
