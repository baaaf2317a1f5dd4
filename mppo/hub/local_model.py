"""Whether a model's path names a folder that can be loaded; reads names, sizes and metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mppo.recipe.errors import ConfigIssue, path_issues
from mppo.safety.input_files import LFS_FIX, LFS_POINTER, is_lfs_pointer
from mppo.weights.model_folder import (
    checkpoint_folder,
    companion_folder,
    is_megatron_checkpoint,
    weights_folder,
)

BUILTIN_PREFIX = "builtin:"
WEIGHT_ENDINGS = (".safetensors",)
_LOCAL = ("model", "models", "checkpoints", "ckpt", "runs", "outputs")
"""First parts of paths that have the form of a Hub's name, but name a folder here."""
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]*\w")


def check_model_folder(key: str, name: str) -> list[ConfigIssue]:
    """Issues of a model's folder and its weights."""
    return path_issues(key, name, _model_issues)


def _model_issues(key: str, name: str) -> Iterator[ConfigIssue]:
    if name.startswith(BUILTIN_PREFIX):
        return
    folder = Path(name)
    if not folder.is_dir():
        yield no_model_folder(key, name)
        return
    folder = weights_folder(folder)
    if is_megatron_checkpoint(folder):
        yield from _checkpoint(key, folder)
    elif not (folder / "config.json").is_file() and (folder / "actor/config.json").is_file():
        fix = f"give the model that it exported: {folder / 'actor'}"
        yield ConfigIssue(key, name, "is a run folder, not a model", fix)
    elif not (folder / "config.json").is_file():
        fix = "give a Hugging Face model folder, or a Megatron torch_dist checkpoint"
        yield ConfigIssue(key, name, "has no config.json", fix)
    elif not any(f.suffix in WEIGHT_ENDINGS for f in folder.iterdir()):
        fix = "download the weights"
        yield ConfigIssue(key, name, "has no *.safetensors", fix)
    else:
        pointers = sorted(file.name for file in folder.iterdir() if is_lfs_pointer(file))
        if pointers:
            yield ConfigIssue(key, name, f"{pointers[0]} {LFS_POINTER}", LFS_FIX)


def no_model_folder(key: str, name: str) -> ConfigIssue:
    """The issue of a model path that is not a folder."""
    if is_hub_name(name) and name.partition("/")[0] not in _LOCAL:
        why = "no such folder; models of the Hugging Face Hub are not downloaded by default"
        fix = (
            f"set model.hub: true, or run `hf download {name} --local-dir models/{name}` and give "
            f"that folder"
        )
        return ConfigIssue(key, name, why, fix)
    why = "is a file, not a folder" if Path(name).exists() else "no such folder"
    fix = "give a Hugging Face folder (config.json, tokenizer, safetensors) or builtin:tiny"
    return ConfigIssue(key, name, why, fix)


def is_hub_name(name: str) -> bool:
    """Whether a model's name has the Hub's form ``owner/model`` and does not exist on this disk."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _checkpoint(key: str, folder: Path) -> Iterator[ConfigIssue]:
    from mppo.weights.torch_dist.contents import read_checkpoint

    try:
        companion_folder(folder)
        read_checkpoint(checkpoint_folder(folder))
    except ValueError as error:
        why, _, fix = str(error).removeprefix(f"{folder}: ").partition("; ")
        yield ConfigIssue(key, str(folder), why, fix or "give a folder that Megatron saved")
