"""Save a role as a Hugging Face folder: all ranks write, and the folder appears when complete."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.groups import LayoutGroups
from mppo.recipe.model_shape import model_shape
from mppo.safety.disk import FileEntry, file_checksum, write_marker
from mppo.weights.hf.output_folder import (
    MAX_SHARD_BYTES,
    copy_companions,
    create_files,
    partial_path,
    plan_places,
    publish,
    write_index,
    write_tensor,
)
from mppo.weights.stream import WeightStream


def save_hf(
    folder: str | Path,
    chunks: Sequence[Any],
    hf_config: Any,
    groups: LayoutGroups,
    source: str | Path | None = None,
    bucket_bytes: int = 512 << 20,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path | None:
    """Write the role's weights, config and tokenizer; collective over all ranks.

    The files are written to a folder beside the final one, which all ranks see, with a marker that
    holds their checksums; it is renamed when it is complete and on disk. If a folder of that name
    exists, it is replaced if mppo wrote it, else renamed: its new path is returned on the first
    rank. The config is copied from the Hugging Face folder ``source``; None: it is ``hf_config``.
    """
    folder = Path(folder).absolute()
    building = partial_path(folder)
    rank = dist.get_rank()
    stream = WeightStream(chunks, hf_config, groups, bucket_bytes)
    tensors = stream.tensors()
    headers, places = plan_places(building, tensors, max_shard_bytes)
    if rank == 0:
        if building.exists():
            shutil.rmtree(building)
        building.mkdir(parents=True)
        create_files(headers)
    dist.barrier()
    # every rank has every tensor of the stream; each writes every world-th one
    for number, (name, tensor) in enumerate(chain.from_iterable(stream)):
        if number % dist.get_world_size() == rank:
            write_tensor(places[name], tensor)
    dist.barrier()
    files = _checksums(sorted(headers))
    kept = None
    if rank == 0:
        weights_dtype = next(dtype for dtype, shape in tensors.values() if len(shape) == 2)
        if source is None:
            hf_config.save_pretrained(building)
        else:
            bins = model_shape(hf_config).value_bins
            copy_companions(Path(source), building, weights_dtype, bins)
        write_index(building, places)
        others = [file for file in building.iterdir() if file not in headers]
        files |= {file.name: file_checksum(file) for file in others}
        write_marker(building, files)
        kept = publish(folder)
    dist.barrier()
    return kept


def _checksums(files: Sequence[Path]) -> dict[str, FileEntry]:
    """Checksums of the files of one folder, by name; the ranks divide the files. Collective."""
    mine = {
        file.name: file_checksum(file) for file in files[dist.get_rank() :: dist.get_world_size()]
    }
    return {name: entry for part in all_gather_objects(mine) for name, entry in part.items()}
