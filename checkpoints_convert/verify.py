"""Proof that a checkpoint and a Hugging Face folder hold the same model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from checkpoints_convert.commands import find_checkpoint, read_shape
from checkpoints_convert.job import Ranks
from mppo.weights.hf.folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.hf.transfer import Copier, CopyTask
from mppo.weights.load import known_extras
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import Share, full_stretch
from mppo.weights.torch_dist.reader import CheckpointReader

HOLE = 0xFF  # a NaN in every float type


@dataclass(frozen=True)
class Compared:
    """One tensor's comparison: checksums of both sides in the checkpoint's dtype."""

    name: str
    megatron: int
    hf: int


def verify(
    hf: Path, megatron: Path, ranks: Ranks, logits: bool = False, checksums: bool = False
) -> tuple[int, str]:
    """Compare every tensor in Hugging Face coordinates; collective.

    Buffers are filled with NaNs before the checkpoint's stretches are read into them, so a hole in
    the checkpoint shows as a difference. Every tensor that the architecture has or the folder holds
    is compared, or missing on one side, or a known extra of the folder.

    Args:
        hf: the folder.
        megatron: the checkpoint.
        ranks: who shares the work.
        logits: also run both models and compare logits; every process builds the whole model.
        checksums: list a checksum per tensor.

    Returns:
        Exit status (0 equal, 1 not) and what to say.

    Raises:
        ValueError: an input is not what it should be.
    """
    shape = read_shape(hf)
    source = HFFolder(hf)
    extras = set(known_extras(source, shape))
    folder, _ = find_checkpoint(megatron, hf)
    reader = CheckpointReader(read_checkpoint(folder), parameter_table(shape))
    compared = _gathered(_compare(source, reader, shape.kv_heads, ranks.share), ranks)
    names = {item.name for item in compared}
    assert len(names) == len(compared)
    held = {name for entry in reader.entries() for name in entry.hf}
    lost = {
        **dict.fromkeys(sorted(held - set(source.tensors)), "folder"),
        **dict.fromkeys(sorted(set(source.tensors) - names - extras), "checkpoint"),
    }
    extras -= names
    different = [item for item in compared if item.megatron != item.hf]
    lines = [f"{item.name}  {item.hf:08x}" for item in compared] if checksums else []
    lines += [
        f"DIFFERENT  {item.name}: checkpoint {item.megatron:08x}, folder {item.hf:08x}"
        for item in different
    ]
    lines += [f"MISSING  {name}: not in the {where}" for name, where in lost.items()]
    whole = zlib.crc32(",".join(f"{i.name}:{i.hf:08x}" for i in compared).encode())
    equal = len(compared) - len(different)
    lines.append(f"{equal} of {len(compared)} tensors are equal (checksum {whole:08x})")
    if extras:
        lines.append(f"{len(extras)} tensors are not part of the model, such as {min(extras)}")
    status = 1 if different or lost else 0
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
    ours, theirs, out, done = Copier(), Copier(), [], 0
    for entry, number, name in parts:
        if share.takes(done, total):
            shape = entry.row.shapes[number]
            target = StoredTensor(Path(), 0, reader.dtype(entry), shape)
            mine = CopyTask(name, target, reader.stretches(entry, number))
            whole = CopyTask(name, target, (full_stretch(source, name),))
            out.append(Compared(name, _checksum(ours, mine), _checksum(theirs, whole)))
        done += source.tensors[name].nbytes
    ours.close()
    theirs.close()
    return out


def _checksum(copier: Copier, task: CopyTask) -> int:
    value = 0
    for _, window in copier.windows(task, HOLE):
        value = zlib.crc32(memoryview(window), value)
    return value


def _gathered(compared: list[Compared], ranks: Ranks) -> list[Compared]:
    if ranks.world == 1:
        return compared
    everywhere: list[list[Compared]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(everywhere, compared)
    return [item for part in everywhere for item in part]
