"""Atomic publication of an output folder, and safetensors files written by offset."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.recipe.model_shape import VALUE_BINS
from mppo.safety.disk import flush, is_as_written, naming, set_aside
from mppo.safety.input_error import InputError
from mppo.safety.input_files import inside, read_json
from mppo.weights.hf.input_folder import INDEX
from mppo.weights.hf.safetensors_file import StoredTensor, byte_view, make_header

MAX_SHARD_BYTES = 5 * 10**9
TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def partial_path(folder: Path) -> Path:
    """Return the path under which a folder is built before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def check_free(folder: Path) -> None:
    """Raise InputError unless the output does not exist or is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: already exists; remove it or name another output")


def publish(folder: Path) -> Path | None:
    """Flush the partial folder's files to disk and rename the folder to its final name. An existing
    folder of that name is replaced if it is empty, or unchanged since mppo wrote it; anything else
    is renamed, and its new path returned."""
    building, old = partial_path(folder), folder.with_name(f".{folder.name}.replaced")
    for file in sorted(building.rglob("*")):
        if file.is_file():
            flush(file)
    kept = None
    if is_as_written(folder):
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    elif folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
    elif os.path.lexists(folder):
        kept = set_aside(folder)
    building.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return kept


def write_all(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def write_tensor(place: StoredTensor, tensor: Tensor) -> None:
    assert (tuple(tensor.shape), tensor.dtype) == (place.shape, place.dtype)
    if not tensor.numel():
        return
    view = byte_view(tensor.detach().cpu().contiguous())
    with naming(place.file), place.file.open("r+b", buffering=0) as stream:
        write_all(stream.fileno(), view, place.offset)


def plan_files(
    folder: Path, tensors: TensorTypes, max_shard_bytes: int
) -> dict[Path, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Assign tensors to safetensors files, in order; a file has more than ``max_shard_bytes`` only
    for a single tensor."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = dtype.itemsize * int(torch.Size(shape).numel())
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += nbytes
    if len(shards) == 1:
        return {folder / "model.safetensors": shards[0]}
    return {
        folder / f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, 1)
    }


def plan_places(
    folder: Path, tensors: TensorTypes, max_shard_bytes: int
) -> tuple[dict[Path, tuple[bytes, int]], dict[str, StoredTensor]]:
    """Plan the headers and total sizes of the files, and the place of each tensor."""
    headers, places = {}, {}
    for file, shard in plan_files(folder, tensors, max_shard_bytes).items():
        head, found = make_header(shard, file)
        places.update(found)
        headers[file] = (head, len(head) + sum(place.nbytes for place in found.values()))
    return headers, places


def create_files(headers: Mapping[Path, tuple[bytes, int]]) -> None:
    """Create the files with their headers at full length; the data is written later."""
    for file, (head, size) in headers.items():
        with naming(file), file.open("wb") as stream:
            stream.write(head)
            stream.truncate(size)


def write_index(folder: Path, places: Mapping[str, StoredTensor]) -> None:
    """Write ``model.safetensors.index.json`` if there is more than one file."""
    if len({place.file for place in places.values()}) < 2:
        return
    total = sum(place.nbytes for place in places.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: places[name].file.name for name in sorted(places)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def companion_files(source: Path) -> list[str]:
    """Names of a Hugging Face folder's files that are not weights; InputError if a link among them
    leads out of the folder, as a copy would hold that foreign file."""
    return [
        inside(source, file.name).name
        for file in sorted(source.iterdir())
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and file.name[0] != "."
    ]


def copy_companions(
    source: Path, folder: Path, dtype: torch.dtype | None = None, value_bins: int = 1
) -> None:
    """Copy configuration, tokenizer, chat template and code of a Hugging Face folder.

    Args:
        dtype: written to ``config.json`` as the weights' dtype; quantisation settings are then
            removed. None copies ``config.json`` unchanged.
        value_bins: outputs of the value head, written beside the dtype if there are several.
    """
    copied = companion_files(source)
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    if dtype is not None and "config.json" in copied:
        config = read_json(folder / "config.json")
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
        config.pop("quantization_config", None)
        config |= {VALUE_BINS: value_bins} if value_bins > 1 else {}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
