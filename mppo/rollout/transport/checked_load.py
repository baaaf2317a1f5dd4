"""A weight loader that runs inside mppo's own SGLang servers.

SGLang calls ``load(model, named_tensors)`` (its ``custom_weight_loader`` option) with two tensors:
the bytes of a bucket, and a table that says what they are. Whatever is wrong is written to the file
the table names, where the trainer looks after each bucket: an exception here would end the server.

With checksums in the table, bytes must be as sent, every tensor must have a place in the server's
model, and what can be compared must be held there afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

LOADER = "mppo.rollout.transport.checked_load.load"
BYTES, TABLE = "mppo.bytes", "mppo.table"
_WORD = 4
_FUSED = (
    (r"\.(q|k|v)_proj\.(weight|bias)$", r".qkv_proj.\2"),
    (r"\.(gate|up)_proj\.(weight|bias)$", r".gate_up_proj.\2"),
    (r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$", ".fused_qkv_a_proj_with_mqa.weight"),
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", ".experts.w13_weight"),
    (r"\.experts\.\d+\.(down_proj|w2)\.weight$", ".experts.w2_weight"),
)
"""Checkpoint names, and the names under which SGLang holds several of them in one."""
_SHARED = "lm_head.weight"
"""Not a parameter of its own where embeddings are tied."""


@dataclass(frozen=True)
class BucketEntry:
    """One tensor of a bucket: bytes ``start`` to ``end``; not checked without a ``checksum``."""

    name: str
    dtype: str
    shape: Sequence[int]
    start: int
    end: int
    checksum: tuple[int, int] | None = None


def tensor_checksum(flat: Tensor) -> tuple[int, int]:
    """Sum of all 32-bit words, and of every second one.

    Args:
        flat: uint8, its length a multiple of 4 or padded here by zeros.
    """
    if flat.numel() % _WORD:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % _WORD)])
    words = flat.view(torch.int32)
    return int(words.sum(dtype=torch.int64)), int(words[::2].sum(dtype=torch.int64))


def bucket_table(entries: Sequence[BucketEntry], report: Path, whole: bool) -> Tensor:
    """What a bucket holds, as JSON bytes: uint8 on the CPU.

    Args:
        entries: its tensors.
        report: file for whatever is wrong.
        whole: the server is one rank, which so holds whole tensors.
    """
    rows = [list(vars(entry).values()) for entry in entries]
    content = {"report": str(report), "whole": whole, "rows": rows}
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket; a fault is written to the report."""
    received = dict(named_tensors)
    content = json.loads(received[TABLE].cpu().numpy().tobytes())
    entries = [BucketEntry(*row) for row in content["rows"]]
    try:
        _load(model, received[BYTES], entries, content["whole"])
    except Exception as error:
        with Path(content["report"]).open("a") as report:
            report.write(f"{type(error).__name__}: {error}\n")


def _load(model: nn.Module, flat: Tensor, entries: Sequence[BucketEntry], whole: bool) -> None:
    """Check, load, check.

    Raises:
        ValueError: names the first tensor that is not as sent, or not as loaded.
    """
    tensors = [
        (e.name, flat[e.start : e.end].view(getattr(torch, e.dtype)).view(list(e.shape)))
        for e in entries
    ]
    checked = [e.name for e in entries if e.checksum is not None]
    for entry in entries:
        if entry.checksum is None:
            continue
        if list(tensor_checksum(flat[entry.start : entry.end])) != list(entry.checksum):
            raise ValueError(f"verify_sync: {entry.name} arrived with other bytes than were sent")
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())} if checked else {}
    for name in checked:
        if _place(name, held) is None and name != _SHARED:
            raise ValueError(f"verify_sync: {name} was sent, but SGLang's model has no such tensor")
    model.load_weights(tensors)
    for name, tensor in tensors if checked else ():
        part = _part(name, tensor, held, whole)
        if part is not None and not torch.equal(part, tensor.to(part.device, part.dtype)):
            raise ValueError(f"verify_sync: {name} was sent, but SGLang holds something else")


def _place(name: str, held: dict[str, Tensor]) -> str | None:
    """The parameter that holds a checkpoint's tensor, alone or with others."""
    if name in held:
        return name
    fused = (re.sub(pattern, into, name) for pattern, into in _FUSED)
    return next((other for other in fused if other != name and other in held), None)


def _part(name: str, tensor: Tensor, held: dict[str, Tensor], whole: bool) -> Tensor | None:
    """Where a checkpoint's tensor lies in the model; None where that cannot be told.

    Shards of several ranks are not looked at, nor experts on a GPU, whose order is the kernel's.
    """
    place = _place(name, held)
    if place is None or not whole:
        return None
    parameter, rows = held[place].detach(), len(tensor)
    if ".experts." in place:
        if parameter.device.type != "cpu":
            return None
        parameter = parameter[int(re.search(r"\.experts\.(\d+)\.", name)[1])]
    if parameter.shape == tensor.shape:
        return parameter
    if parameter.dim() != tensor.dim() or parameter.shape[1:] != tensor.shape[1:]:
        return None
    kind = name.rsplit(".", 2)[-2]
    last = len(parameter) - rows
    first = {
        "q_proj": 0, "k_proj": last - rows, "v_proj": last,
        "gate_proj": 0, "up_proj": len(parameter) // 2, "w1": 0, "w3": len(parameter) // 2,
    }.get(kind)  # fmt: skip
    return None if first is None else parameter[first : first + rows]
