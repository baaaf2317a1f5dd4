"""Plans of a conversion between a Hugging Face folder and a Megatron ``torch_dist`` checkpoint.

Both directions turn the blocks of the parameter table into byte ranges of files. The plan is the
same on every rank, but a rank computes only the tasks of its own share in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mppo.recipe.model_shape import ModelShape
from mppo.safety.input_error import InputError
from mppo.weights.hf.input_folder import FLOAT8, HFFolder
from mppo.weights.hf.output_folder import MAX_SHARD_BYTES, plan_places
from mppo.weights.hf.safetensors_file import StoredTensor, make_header, read_header
from mppo.weights.hf.transfer import CopyTask, Scales, Stretch, matrix
from mppo.weights.load_stages import is_extra_layer, known_extras
from mppo.weights.table import Entry, Table, parameter_table
from mppo.weights.torch_dist.contents import Chunk, GlobalTensor
from mppo.weights.torch_dist.format import ChunkFiles, archive_frame, file_bytes
from mppo.weights.torch_dist.keys import extra_states, is_homogeneous, place
from mppo.weights.torch_dist.reader import CheckpointReader, row_ranges

EXTRA_FILE = "extra.safetensors"


@dataclass(frozen=True)
class Share:
    """One of ``world`` shares of a plan with an equal number of bytes."""

    rank: int = 0
    world: int = 1

    def takes(self, done: int, total: int) -> bool:
        """Whether the item that starts after ``done`` of ``total`` bytes is in this share."""
        return done * self.world // max(total, 1) == self.rank


@dataclass(frozen=True)
class Plan:
    """The files (bytes at the start, full size) and copy tasks (this share's, by number in the full
    plan) of a conversion, and tensors of the source that are not converted."""

    tasks: Mapping[int, CopyTask]
    files: Mapping[Path, tuple[bytes, int]]
    total_bytes: int
    count: int
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronIndex:
    """Contents of the checkpoint's ``.metadata``: tensor keys and byte objects."""

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
        dtype: cast weights to this (a router's float32 bias is kept); None: as stored, 8-bit floats
            as bfloat16.
        keep_extra: also copy multi-token-prediction layers, to a file of their own.
        max_file_bytes: None: see ``file_bytes``.

    Raises:
        InputError: folder and config do not belong together.
    """
    share = share or Share()
    table = parameter_table(shape)
    extras = known_extras(source, shape)
    entries = list(table.stored_entries(lambda entry: entry.hf[0] in source.tensors))
    for entry in entries:
        if entry.hf[0] not in source.tensors:  # the projection: all others have been checked
            value = table.value_entry().hf[0]
            raise InputError(f"the folder has neither {entry.hf[0]} nor {value}")
    converted = {name for entry in entries for name in entry.hf}
    extras = tuple(name for name in extras if name not in converted)
    dtypes = _target_dtypes(source, table, entries, dtype)
    sizes = [
        _nbytes(entry.shard_shape(1), kind) for entry, kind in zip(entries, dtypes, strict=True)
    ]
    kept = _extra_types(source, extras, shape) if keep_extra else {}
    total = sum(sizes) + sum(_nbytes(size, kind) for kind, size in kept.values())
    # every rank assigns all places, because the index lists all chunks and files
    layout = ChunkFiles(folder, max_file_bytes or file_bytes(total))
    tensors: dict[str, GlobalTensor] = {}
    tasks, done = {}, 0
    for number, (entry, kind, size) in enumerate(zip(entries, dtypes, sizes, strict=True)):
        where = place(entry, table, is_homogeneous(table))
        local = entry.shard_shape(1)
        # a chunk holds one layer (and one expert): a box of size 1 in each leading dimension
        chunk_shape = (1,) * len(where.leading) + local
        head, tail = archive_frame(kind, chunk_shape)
        file, begin = layout.take(len(head) + size + len(tail))
        offsets = tuple(i for i, _ in where.leading) + (0,) * len(local)
        chunk = Chunk(offsets, chunk_shape, file, begin, len(head) + size + len(tail))
        global_shape = tuple(n for _, n in where.leading) + local
        for key in where.keys:
            before = tensors[key].chunks if key in tensors else ()
            tensors[key] = GlobalTensor(global_shape, kind, (*before, chunk))
        # the costly part, for the tasks of this share only
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
    """Plan a Hugging Face folder's weights from a ``torch_dist`` checkpoint; ``extra_file`` has
    tensors to add unchanged.

    Raises:
        InputError: the checkpoint lacks a parameter, or has it in another shape.
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
                stretches = (Stretch(extras[name], 0, 0, matrix(target.shape)[0]),)
            else:
                stretches = reader.stretches(*parts[number])
            tasks[number] = CopyTask(name, target, stretches)
        done += target.nbytes
    return Plan(tasks, headers, total, len(places), tuple(extras)), places


def full_stretch(source: HFFolder, name: str) -> Stretch:
    """Return the stretch of all rows of a folder's tensor, dequantised."""
    stored, scales = source.tensors[name], source.scales(name)
    return Stretch(stored, 0, 0, matrix(stored.shape)[0], scales=scales and Scales(*scales))


def _import_stretches(entry: Entry, source: HFFolder, shape: ModelShape) -> tuple[Stretch, ...]:
    out = []
    for number, name in enumerate(entry.hf):
        stored, scales = source.tensors[name], source.scales(name)
        for hf_row, row, length in row_ranges(entry, number, shape.kv_heads):
            out.append(Stretch(stored, hf_row, row, length, scales=scales and Scales(*scales)))
    return tuple(out)


def _extra_types(
    source: HFFolder, extras: Iterable[str], shape: ModelShape
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        name: (_plain_dtype(source.tensors[name].dtype), source.tensors[name].shape)
        for name in extras
        if is_extra_layer(name, shape)
    }


def _extra_tasks(
    folder: Path, source: HFFolder, types: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    first: int, share: Share, done: int, total: int, tasks: dict[int, CopyTask],
) -> dict[Path, tuple[bytes, int]]:  # fmt: skip
    """Add the tasks that copy extra tensors, dequantised, to their own file; return the file."""
    file = folder / EXTRA_FILE
    head, places = make_header(types, file)
    for number, name in enumerate(types, first):
        if share.takes(done, total):
            tasks[number] = CopyTask(name, places[name], (full_stretch(source, name),))
        done += places[name].nbytes
    return {file: (head, len(head) + sum(p.nbytes for p in places.values()))}


def _target_dtypes(
    source: HFFolder, table: Table, entries: list[Entry], dtype: torch.dtype | None
) -> list[torch.dtype]:
    """Choose the dtype of each entry; InputError if parts of one Megatron tensor are stored in
    several dtypes, and ``dtype`` is None: an implicit cast would lose bits."""
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
                raise InputError(
                    f"{source.path}: {name} is stored as {stored}, other parts of the same "
                    f"Megatron tensor as {known[key]}; {fix}"
                )
        out.append(known[key])
    return out


def _plain_dtype(stored: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if stored in FLOAT8 else stored


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
