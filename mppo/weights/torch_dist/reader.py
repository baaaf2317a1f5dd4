"""The parameters of a model in a ``torch_dist`` checkpoint, as stretches of its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.recipe.model_shape import model_shape
from mppo.safety.input_error import InputError
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.hf.transfer import Copier, CopyTask, Stretch, matrix
from mppo.weights.model_folder import checkpoint_folder, is_megatron_checkpoint
from mppo.weights.table import Entry, Table, parameter_table
from mppo.weights.torch_dist.contents import (
    Chunk,
    GlobalTensor,
    check_complete,
    needed_shape,
    read_checkpoint,
)
from mppo.weights.torch_dist.format import locate
from mppo.weights.torch_dist.keys import place


def model_prefix(checkpoint: Mapping[str, GlobalTensor]) -> str:
    """Return the prefix of the model's parameter names in a checkpoint's keys; InputError if it
    holds no model, or several. Keys without a prefix are the model's; the same names with one are
    then something else, such as an optimizer's state or a moving average."""
    end = "embedding.word_embeddings.weight"
    if end in checkpoint:
        return ""
    prefixes = [
        key.removesuffix(end) for key in checkpoint if key.endswith(end) and "optimizer" not in key
    ]
    if len(prefixes) != 1:
        raise InputError(
            f"the checkpoint holds {len(prefixes)} models ({', '.join(prefixes) or 'none'}); name "
            "a checkpoint of one model"
        )
    return prefixes[0]


def value_bins(checkpoint: Mapping[str, GlobalTensor]) -> int:
    """Outputs of a checkpoint's value head; 1 without one."""
    key = f"{model_prefix(checkpoint)}value_head.weight"
    return checkpoint[key].shape[0] if key in checkpoint else 1


class CheckpointReader:
    """Finds a parameter table's entries in a checkpoint; InputError as ``model_prefix``."""

    def __init__(self, checkpoint: Mapping[str, GlobalTensor], table: Table) -> None:
        self.checkpoint, self.table = checkpoint, table
        self.prefix = model_prefix(checkpoint)
        start = f"{self.prefix}decoder.layers.self_attention."
        self.homogeneous = any(key.startswith(start) for key in checkpoint)
        self._boxes: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._located: dict[Chunk, StoredTensor] = {}
        self._checked: set[str] = set()

    def entries(self) -> Iterable[Entry]:
        return self.table.stored_entries(lambda entry: self._find(entry) is not None)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._tensor(entry)[1].dtype

    def stretches(self, entry: Entry, source: int) -> tuple[Stretch, ...]:
        """Return the stretches that fill Hugging Face tensor number ``source`` of an entry."""
        key, _, leading = self._complete_tensor(entry)
        out = []
        boxes = self._group(key, len(leading)).get(tuple(leading), [])
        located = [(chunk, self._locate(chunk)) for chunk in boxes]
        # a row range may span several chunks: take its intersection with each
        for hf_row, row, length in row_ranges(entry, source, self.table.shape.kv_heads):
            for chunk, data in located:
                offsets, sizes = [*chunk.offsets[len(leading) :]], chunk.sizes[len(leading) :]
                begin, end = max(row, offsets[0]), min(row + length, offsets[0] + sizes[0])
                if begin >= end:
                    continue
                column = offsets[1] if len(offsets) > 1 else 0
                flat = StoredTensor(data.file, data.offset, data.dtype, sizes)
                out.append(
                    Stretch(flat, begin - offsets[0], hf_row + begin - row, end - begin, column)
                )
        return tuple(out)

    def check(self, entry: Entry) -> None:
        """Check that the checkpoint holds every number of an entry, of its shape, else InputError;
        nothing of its data is read."""
        self._complete_tensor(entry)

    def _complete_tensor(self, entry: Entry) -> tuple[str, GlobalTensor, list[int]]:
        key, tensor, leading = self._tensor(entry)
        if key not in self._checked:
            where = place(entry, self.table, self.homogeneous, self.prefix)
            shape = tuple(size for _, size in where.leading[: len(leading)]) + entry.shard_shape(1)
            vocab = shape[0] if entry.row.kind == "vocab" else None
            needed = needed_shape(tensor.shape, shape, vocab)
            if needed is None:
                raise InputError(
                    f"the checkpoint's {key} has shape {list(tensor.shape)}, config.json says "
                    f"{list(shape)}; they do not belong together"
                )
            check_complete(f"the checkpoint's {key}", tensor, needed)
            self._checked.add(key)
        return key, tensor, leading

    def _locate(self, chunk: Chunk) -> StoredTensor:
        """Locate a chunk's data; the result is cached for all tensors made from the chunk."""
        if chunk not in self._located:
            self._located[chunk] = locate(chunk)
        return self._located[chunk]

    def _group(self, key: str, depth: int) -> dict[tuple[int, ...], list[Chunk]]:
        if key not in self._boxes:
            groups: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.checkpoint[key].chunks:
                if any(size != 1 for size in chunk.sizes[:depth]):
                    raise InputError(f"{key}: a chunk holds several layers or experts at once")
                groups.setdefault(chunk.offsets[:depth], []).append(chunk)
            self._boxes[key] = groups
        return self._boxes[key]

    def _find(self, entry: Entry) -> tuple[str, GlobalTensor, list[int]] | None:
        where = place(entry, self.table, self.homogeneous, self.prefix)
        leading = [index for index, _ in where.leading]
        for key in where.keys:
            if key in self.checkpoint:
                return key, self.checkpoint[key], leading
        if where.single_key is not None and where.single_key in self.checkpoint:
            return where.single_key, self.checkpoint[where.single_key], leading[:-1]
        return None

    def _tensor(self, entry: Entry) -> tuple[str, GlobalTensor, list[int]]:
        found = self._find(entry)
        if found is None:
            where = place(entry, self.table, self.homogeneous, self.prefix)
            raise InputError(
                f"the checkpoint has no {where.keys[0]} (for {entry.hf[0]}); it is incomplete, or "
                "of another model"
            )
        return found


def row_ranges(entry: Entry, source: int, groups: int) -> list[tuple[int, int, int]]:
    """Map the rows of one Hugging Face tensor to rows of the full Megatron tensor: (first Hugging
    Face row, first Megatron row, number of rows) of each contiguous range."""
    if entry.row.kind == "copy":
        return [(0, 0, matrix(entry.row.shapes[source])[0])]
    ranges, position = [], 0
    for block in entry.blocks(0, 1, groups):
        if block.source == source:
            ranges.append((block.start, position, block.length))
        position += block.length
    return ranges


def full_tensors(path: str | Path, hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a Hugging Face folder or Megatron checkpoint on the CPU, under its
    Hugging Face name, in the stored dtype (8-bit floats as float32).

    Raises:
        ValueError: the checkpoint is incomplete, or of another model.
    """
    if not is_megatron_checkpoint(path):
        source = HFFolder(path)
        yield from ((name, source.read(name)) for name in sorted(source.tensors))
        return
    checkpoint = read_checkpoint(checkpoint_folder(path))
    shape = replace(model_shape(hf_config), value_bins=value_bins(checkpoint))
    reader, copier = CheckpointReader(checkpoint, parameter_table(shape)), Copier()
    for entry in reader.entries():
        for number, (name, shape) in enumerate(zip(entry.hf, entry.row.shapes, strict=True)):
            tensor = torch.empty(shape, dtype=reader.dtype(entry))
            bytes_ = tensor.view(-1).view(torch.uint8).numpy()
            target = StoredTensor(Path(), 0, tensor.dtype, shape)
            done = 0
            for _, window in copier.windows(
                CopyTask(name, target, reader.stretches(entry, number))
            ):
                bytes_[done : done + len(window)] = window
                done += len(window)
            yield name, tensor
    copier.close()
