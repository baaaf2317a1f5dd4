"""Verification that a checkpoint and a Hugging Face folder hold the same model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from checkpoints_convert.commands import find_checkpoint, read_shape
from checkpoints_convert.job import Ranks
from mppo.parallel.collectives import all_gather_objects
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.hf.transfer import Copier, CopyTask
from mppo.weights.load_stages import known_extras
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import Share, full_stretch
from mppo.weights.torch_dist.reader import CheckpointReader

HOLE = 0xFF  # a NaN in every float type


@dataclass(frozen=True)
class Compared:
    """Checksums of one tensor on both sides, in the checkpoint's dtype."""

    name: str
    megatron: int
    hf: int


def verify(
    hf: Path, megatron: Path, ranks: Ranks, logits: bool = False, checksums: bool = False
) -> tuple[int, str]:
    """Compare every tensor in Hugging Face coordinates; return the exit status (0 equal, 1
    different) and a report. Collective. ValueError: an input is invalid.

    Buffers are filled with NaNs before the checkpoint is read into them, so that a gap in the
    checkpoint becomes a difference. Every tensor of the architecture or the folder is either
    compared, or reported as missing on one side, or a known extra of the folder. With ``logits``
    every process builds both complete models.
    """
    shape = read_shape(hf)
    source = HFFolder(hf)
    extras = set(known_extras(source, shape))
    folder, _ = find_checkpoint(megatron, hf)
    reader = CheckpointReader(read_checkpoint(folder), parameter_table(shape))
    parts = all_gather_objects(_compare(source, reader, shape.kv_heads, ranks), ranks.world)
    compared = [item for part in parts for item in part]
    names = {item.name for item in compared}
    assert len(names) == len(compared)
    expected = {name for entry in reader.entries() for name in entry.hf}
    missing = {
        **dict.fromkeys(sorted(expected - set(source.tensors)), "folder"),
        **dict.fromkeys(sorted(set(source.tensors) - names - extras), "checkpoint"),
    }
    extras -= names
    different = [item for item in compared if item.megatron != item.hf]
    lines = [f"{item.name}  {item.hf:08x}" for item in compared] if checksums else []
    lines += [
        f"DIFFERENT  {item.name}: checkpoint {item.megatron:08x}, folder {item.hf:08x}"
        for item in different
    ]
    lines += [f"MISSING  {name}: not in the {where}" for name, where in missing.items()]
    combined = zlib.crc32(",".join(f"{i.name}:{i.hf:08x}" for i in compared).encode())
    equal = len(compared) - len(different)
    lines.append(f"{equal} of {len(compared)} tensors are equal (checksum {combined:08x})")
    if extras:
        lines.append(f"{len(extras)} tensors are not part of the model, such as {min(extras)}")
    status = 1 if different or missing else 0
    if logits:
        from checkpoints_convert.logits import compare_logits

        passed, line = compare_logits(hf, megatron, ranks)
        lines.append(line)
        status = status if passed else 1
    return status, "\n".join(lines)


def _compare(
    source: HFFolder, reader: CheckpointReader, groups: int, share: Share
) -> list[Compared]:
    parts = [
        (entry, number, name)
        for entry in reader.entries()
        for number, name in enumerate(entry.hf)
        if name in source.tensors
    ]
    total = sum(source.tensors[name].nbytes for _, _, name in parts)
    checkpoint, folder, out, done = Copier(), Copier(), [], 0
    for entry, number, name in parts:
        if share.takes(done, total):
            shape = entry.row.shapes[number]
            target = StoredTensor(Path(), 0, reader.dtype(entry), shape)
            converted = CopyTask(name, target, reader.stretches(entry, number))
            stored = CopyTask(name, target, (full_stretch(source, name),))
            sums = _checksum(checkpoint, converted), _checksum(folder, stored)
            out.append(Compared(name, *sums))
        done += source.tensors[name].nbytes
    checkpoint.close()
    folder.close()
    return out


def _checksum(copier: Copier, task: CopyTask) -> int:
    """CRC-32 of a tensor's bytes; gaps count as ``HOLE``."""
    value = 0
    for _, window in copier.windows(task, HOLE):
        value = zlib.crc32(window.data, value)
    return value
