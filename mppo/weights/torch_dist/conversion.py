"""Plans of a conversion between a Hugging Face folder and a Megatron ``torch_dist`` checkpoint.

Both directions are the parameter table's blocks turned into stretches of files. Plans are the same
on every rank; only the tasks a rank runs itself are worked out in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mppo.weights.hf.folder import FLOAT8, HFFolder
from mppo.weights.hf.output_folder import MAX_SHARD_BYTES, plan_places
from mppo.weights.hf.safetensors_file import StoredTensor, make_header, read_header
from mppo.weights.hf.transfer import CopyTask, Scales, Stretch
from mppo.weights.load import is_extra_layer, known_extras
from mppo.weights.shape import ModelShape
from mppo.weights.table import Entry, Table, parameter_table
from mppo.weights.torch_dist.contents import Chunk, GlobalTensor
from mppo.weights.torch_dist.format import ChunkFiles, archive_frame, file_bytes, locate
from mppo.weights.torch_dist.keys import extra_states, is_homogeneous, place

EXTRA_FILE = "extra.safetensors"


@dataclass(frozen=True)
class Share:
    """One of ``world`` equal shares of a plan, cut by bytes."""

    rank: int = 0
    world: int = 1

    def takes(self, done: int, total: int) -> bool:
        """Whether the item that starts after ``done`` of ``total`` bytes is in this share."""
        return done * self.world // max(total, 1) == self.rank


@dataclass(frozen=True)
class Plan:
    """What to write.

    Args:
        tasks: this share's tasks, by number in the whole plan.
        files: every file with the bytes at its start and its full size.
        total_bytes: data bytes of the whole plan.
        count: tasks of the whole plan.
        extras: tensors of the source that are not converted.
    """

    tasks: Mapping[int, CopyTask]
    files: Mapping[Path, tuple[bytes, int]]
    total_bytes: int
    count: int
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronIndex:
    """What the checkpoint's index will say: tensor keys and byte objects."""

    tensors: Mapping[str, GlobalTensor]
    objects: Mapping[str, tuple[Path, int, int]]


def plan_megatron(
    source: HFFolder,
    shape: ModelShape,
    folder: Path,
    dtype: torch.dtype | None = None,
    keep_extra: bool = False,
    share: Share | None = None,
    max_file_bytes: int | None = None,
) -> tuple[Plan, MegatronIndex]:
    """Plan a ``torch_dist`` checkpoint from a Hugging Face folder.

    Args:
        source: the folder.
        shape: its model's sizes.
        folder: the checkpoint folder to write into.
        dtype: cast weights to this (a router's float32 bias is kept); None: as stored, 8-bit floats
            as bfloat16.
        keep_extra: also copy multi-token-prediction layers aside.
        share: the tasks to work out.
        max_file_bytes: a file is closed before it exceeds this; None: see ``file_bytes``.

    Returns:
        The plan and the checkpoint's index.

    Raises:
        ValueError: folder and config do not belong together.
    """
    share = share or Share()
    table = parameter_table(shape)
    extras = known_extras(source, shape)
    entries = list(_entries(table, source.tensors))
    converted = {name for entry in entries for name in entry.hf}
    extras = tuple(name for name in extras if name not in converted)
    dtypes = _target_dtypes(source, table, entries, dtype)
    sizes = [
        _nbytes(entry.shard_shape(1), kind) for entry, kind in zip(entries, dtypes, strict=True)
    ]
    kept = {
        name: (_plain_dtype(source.tensors[name].dtype), source.tensors[name].shape)
        for name in extras
        if keep_extra and is_extra_layer(name, shape)
    }
    total = sum(sizes) + sum(_nbytes(size, kind) for kind, size in kept.values())
    layout = ChunkFiles(folder, max_file_bytes or file_bytes(total))
    tensors: dict[str, GlobalTensor] = {}
    tasks, done = {}, 0
    for number, (entry, kind, size) in enumerate(zip(entries, dtypes, sizes, strict=True)):
        where = place(entry, table, is_homogeneous(table))
        local = entry.shard_shape(1)
        chunk_shape = (1,) * len(where.leading) + local
        head, tail = archive_frame(kind, chunk_shape)
        file, begin = layout.take(len(head) + size + len(tail))
        offsets = tuple(i for i, _ in where.leading) + (0,) * len(local)
        chunk = Chunk(offsets, chunk_shape, file, begin, len(head) + size + len(tail))
        global_shape = tuple(n for _, n in where.leading) + local
        for key in where.keys:
            before = tensors[key].chunks if key in tensors else ()
            tensors[key] = GlobalTensor(global_shape, kind, (*before, chunk))
        if share.takes(done, total):
            target = StoredTensor(file, begin + len(head), kind, local)
            stretches = _import_stretches(entry, source, shape)
            tasks[number] = CopyTask(entry.name, target, stretches, head, tail)
        done += size
    files = layout.files()
    if kept:
        files |= _extra_tasks(folder, source, kept, len(entries), share, done, total, tasks)
    nothing = layout.empty_object_place()
    objects = {key: nothing for key in extra_states(table, is_homogeneous(table))}
    plan = Plan(tasks, files, total, len(entries) + len(kept), extras)
    return plan, MegatronIndex(tensors, objects)


def plan_hf(
    checkpoint: Mapping[str, GlobalTensor],
    shape: ModelShape,
    folder: Path,
    dtype: torch.dtype | None = None,
    extra_file: Path | None = None,
    share: Share | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[Plan, Mapping[str, StoredTensor]]:
    """Plan a Hugging Face folder's weights from a ``torch_dist`` checkpoint.

    Args:
        checkpoint: its tensor keys, from ``read_checkpoint``.
        shape: the model's sizes.
        folder: the folder to write into.
        dtype: cast weights to this (a router's float32 bias is kept); None: as stored.
        extra_file: safetensors file of tensors to add as they are.
        share: the tasks to work out.
        max_shard_bytes: most bytes of one safetensors file.

    Returns:
        The plan and the place of every tensor.

    Raises:
        ValueError: the checkpoint lacks a parameter, or has it in another shape.
    """
    share = share or Share()
    table = parameter_table(shape)
    reader = CheckpointReader(checkpoint, table)
    types: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    parts: list[tuple[Entry, int]] = []
    for entry in reader.entries():
        kind = reader.dtype(entry) if dtype is None or entry.row.keep_fp32 else dtype
        for source, (name, part) in enumerate(zip(entry.hf, entry.row.shapes, strict=True)):
            types[name] = (kind, part)
            parts.append((entry, source))
    extras = read_header(extra_file) if extra_file is not None else {}
    types |= {name: (stored.dtype, stored.shape) for name, stored in extras.items()}
    headers, places = plan_places(folder, types, max_shard_bytes)
    total = sum(stored.nbytes for stored in places.values())
    tasks, done = {}, 0
    for number, (name, target) in enumerate(places.items()):
        if share.takes(done, total):
            if name in extras:
                stretches = (Stretch(extras[name], 0, 0, _rows(target.shape)),)
            else:
                stretches = reader.stretches(*parts[number])
            tasks[number] = CopyTask(name, target, stretches)
        done += target.nbytes
    return Plan(tasks, headers, total, len(places), tuple(extras)), places


def model_prefix(checkpoint: Mapping[str, GlobalTensor]) -> str:
    """What stands before the model's names in a checkpoint's keys.

    Keys without a prefix are the model's, whatever else is kept under the same names with one: an
    optimizer's state, a moving average.

    Raises:
        ValueError: no model in it, or several.
    """
    end = "embedding.word_embeddings.weight"
    if end in checkpoint:
        return ""
    prefixes = [
        key.removesuffix(end) for key in checkpoint if key.endswith(end) and "optimizer" not in key
    ]
    if len(prefixes) != 1:
        raise ValueError(
            f"the checkpoint holds {len(prefixes)} models ({', '.join(prefixes) or 'none'}); name "
            "a checkpoint of one model"
        )
    return prefixes[0]


class CheckpointReader:
    """The table's entries in a ``torch_dist`` checkpoint.

    Args:
        checkpoint: its tensor keys.
        table: the model's table.

    Raises:
        ValueError: no model in it, or several.
    """

    def __init__(self, checkpoint: Mapping[str, GlobalTensor], table: Table) -> None:
        self.checkpoint, self.table = checkpoint, table
        self.prefix = model_prefix(checkpoint)
        start = f"{self.prefix}decoder.layers.self_attention."
        self.homogeneous = any(key.startswith(start) for key in checkpoint)
        self._boxes: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._located: dict[Chunk, StoredTensor] = {}

    def entries(self) -> Iterable[Entry]:
        """The entries the checkpoint should hold: a value model has no vocabulary projection."""
        value = self.table.value_entry()
        has_value = self._find(value) is not None
        for entry in self.table.entries():
            if not (has_value and entry.row.where == "output" and self._find(entry) is None):
                yield entry
        if has_value:
            yield value

    def dtype(self, entry: Entry) -> torch.dtype:
        """Stored dtype of an entry."""
        return self._tensor(entry)[1].dtype

    def stretches(self, entry: Entry, source: int) -> tuple[Stretch, ...]:
        """What fills Hugging Face tensor number ``source`` of an entry."""
        key, tensor, leading = self._tensor(entry)
        shape = entry.shard_shape(1)
        stored = tensor.shape[len(leading) :]
        longer = entry.row.kind == "vocab" and stored[0] >= shape[0] and stored[1:] == shape[1:]
        if stored != shape and not longer:
            raise ValueError(
                f"the checkpoint's {key} has shape {list(stored)}, config.json says {list(shape)}; "
                "they do not belong together"
            )
        out = []
        boxes = self._group(key, len(leading)).get(tuple(leading), [])
        located = [(chunk, self._locate(chunk)) for chunk in boxes]
        for hf_row, row, length in row_ranges(entry, source, self.table.shape.kv_heads):
            for chunk, data in located:
                offsets, sizes = chunk.offsets[len(leading) :], chunk.sizes[len(leading) :]
                begin, end = max(row, offsets[0]), min(row + length, offsets[0] + sizes[0])
                if begin >= end:
                    continue
                column = offsets[1] if len(offsets) > 1 else 0
                flat = StoredTensor(data.file, data.offset, data.dtype, sizes)
                out.append(
                    Stretch(flat, begin - offsets[0], hf_row + begin - row, end - begin, column)
                )
        return tuple(out)

    def _locate(self, chunk: Chunk) -> StoredTensor:
        """Where a chunk's data lies; looked up once for all tensors made of it."""
        if chunk not in self._located:
            self._located[chunk] = locate(chunk)
        return self._located[chunk]

    def _group(self, key: str, depth: int) -> dict[tuple[int, ...], list[Chunk]]:
        """A key's chunks by their leading indices."""
        if key not in self._boxes:
            groups: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.checkpoint[key].chunks:
                if any(size != 1 for size in chunk.sizes[:depth]):
                    raise ValueError(f"{key}: a chunk holds several layers or experts at once")
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
            raise ValueError(
                f"the checkpoint has no {where.keys[0]} (for {entry.hf[0]}); it is incomplete, or "
                "of another model"
            )
        return found


def row_ranges(entry: Entry, source: int, groups: int) -> list[tuple[int, int, int]]:
    """Where rows of one Hugging Face tensor lie in the whole Megatron tensor.

    Returns:
        (first row there, first row here, rows) of each contiguous range.
    """
    if entry.row.kind == "copy":
        return [(0, 0, _rows(entry.row.shapes[source]))]
    ranges, position = [], 0
    for block in entry.blocks(0, 1, groups):
        if block.source == source:
            ranges.append((block.start, position, block.length))
        position += block.length
    return ranges


def _entries(table: Table, present: Mapping[str, StoredTensor]) -> Iterable[Entry]:
    """The entries a folder holds: one with a value head may lack the vocabulary projection."""
    value = table.value_entry()
    has_value = value.hf[0] in present
    for entry in table.entries():
        if entry.row.where == "output" and entry.hf[0] not in present:
            if not has_value:
                raise ValueError(f"the folder has neither {entry.hf[0]} nor {value.hf[0]}")
            continue
        yield entry
    if has_value:
        yield value


def whole_stretch(source: HFFolder, name: str) -> Stretch:
    """A tensor of a folder from its first row to its last, dequantised."""
    stored, scales = source.tensors[name], source.scales(name)
    return Stretch(stored, 0, 0, _rows(stored.shape), scales=scales and Scales(*scales))


def _import_stretches(entry: Entry, source: HFFolder, shape: ModelShape) -> tuple[Stretch, ...]:
    out = []
    for number, name in enumerate(entry.hf):
        stored, scales = source.tensors[name], source.scales(name)
        for hf_row, row, length in row_ranges(entry, number, shape.kv_heads):
            out.append(Stretch(stored, hf_row, row, length, scales=scales and Scales(*scales)))
    return tuple(out)


def _extra_tasks(
    folder: Path, source: HFFolder, types: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    first: int, share: Share, done: int, total: int, tasks: dict[int, CopyTask],
) -> dict[Path, tuple[bytes, int]]:  # fmt: skip
    """Tasks that copy tensors aside, 8-bit floats dequantised; returns their file."""
    file = folder / EXTRA_FILE
    head, places = make_header(types, file)
    for number, name in enumerate(types, first):
        if share.takes(done, total):
            tasks[number] = CopyTask(name, places[name], (whole_stretch(source, name),))
        done += places[name].nbytes
    return {file: (head, len(head) + sum(p.nbytes for p in places.values()))}


def _target_dtypes(
    source: HFFolder, table: Table, entries: list[Entry], dtype: torch.dtype | None
) -> list[torch.dtype]:
    """What each entry is written as.

    Raises:
        ValueError: parts of one Megatron tensor are stored in several dtypes, and no cast is asked
            for; a silent one would lose bits.
    """
    out: list[torch.dtype] = []
    known: dict[object, torch.dtype] = {}
    homogeneous = is_homogeneous(table)
    for entry in entries:
        if dtype is not None and not entry.row.keep_fp32:
            out.append(dtype)
            continue
        key = entry.row.name if homogeneous else (entry.layer, entry.row.name)
        for name in entry.hf:
            stored = _plain_dtype(source.tensors[name].dtype)
            if known.setdefault(key, stored) != stored:
                fix = "store them alike" if entry.row.keep_fp32 else "cast all of them: --dtype"
                raise ValueError(
                    f"{source.path}: {name} is stored as {stored}, other parts of the same "
                    f"Megatron tensor as {known[key]}; {fix}"
                )
        out.append(known[key])
    return out


def _plain_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of a tensor once dequantised."""
    return torch.bfloat16 if stored in FLOAT8 else stored


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
