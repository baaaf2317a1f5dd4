"""A weight loader that runs inside the SGLang server and checks what it got.

SGLang calls ``load(model, named_tensors)`` (its ``custom_weight_loader`` option) with two tensors:
the bytes of a bucket, and a table that says what they are and must add up to. A bucket that differs
from what was sent, or a parameter that does not hold afterwards what was loaded into it, ends the
server with a message that names the tensor; the trainer shows the end of its log.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from torch import Tensor, nn

LOADER = "mppo.rollout.checked_load.load"
BYTES, TABLE = "mppo.bytes", "mppo.table"
_WORD = 4


def checksum(flat: Tensor) -> tuple[int, int]:
    """Sum of all 32-bit words, and of every second one.

    Args:
        flat: uint8, its length a multiple of 4 or padded here by zeros.
    """
    if flat.numel() % _WORD:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % _WORD)])
    words = flat.view(torch.int32)
    return int(words.sum(dtype=torch.int64)), int(words[::2].sum(dtype=torch.int64))


def table_of(flat: Tensor, metadata: list[SimpleNamespace]) -> Tensor:
    """What ``flat`` holds, as JSON bytes: uint8 on the CPU."""
    rows = [
        [
            m.name,
            str(m.dtype).removeprefix("torch."),
            m.shape,
            m.start_idx,
            m.end_idx,
            checksum(flat[m.start_idx : m.end_idx]),
        ]
        for m in metadata
    ]
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Check a bucket, load it, and check what can be compared one to one.

    Raises:
        ValueError: names the first tensor that is not as sent or not as loaded.
    """
    content = dict(named_tensors)
    flat = content[BYTES]
    tensors = []
    for name, dtype, shape, start, end, expected in json.loads(bytes(content[TABLE].tolist())):
        piece = flat[start:end]
        if list(checksum(piece)) != expected:
            raise ValueError(f"verify_sync: {name} arrived with other bytes than were sent")
        tensors.append((name, piece.view(getattr(torch, dtype)).view(shape)))
    model.load_weights(tensors)
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        held = parameters.get(name)
        # fused and sharded parameters have other names or shapes
        same = held is not None and held.shape == tensor.shape
        if same and not torch.equal(held.detach(), tensor.to(held.device, held.dtype)):
            raise ValueError(f"verify_sync: {name} was sent but the server holds something else")
