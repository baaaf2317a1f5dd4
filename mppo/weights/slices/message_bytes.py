"""The content of a message: all bytes of its pieces, or only the blocks that changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mppo.weights.bucket import aligned

BLOCK = 32
"""Bytes that are compared, and sent, together: 16 elements of bfloat16."""
ALL_BLOCKS = -1
"""Number of blocks of a message that has all bytes, without indices."""
INDEX_BYTES = 4


def message_bytes(blocks: int, full: int) -> int:
    """Bytes of a message with this number of blocks, or all ``full`` bytes (``ALL_BLOCKS``)."""
    if blocks == ALL_BLOCKS:
        return full
    return aligned(blocks * INDEX_BYTES, BLOCK) + blocks * BLOCK


def adjacent_runs(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Byte ranges ``[begin, end)``, with adjacent ones merged: fewer copies."""
    runs: list[tuple[int, int]] = []
    for begin, end in spans:
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def block_message(
    packed: Tensor, changed: Tensor | None, runs: Sequence[tuple[int, int]]
) -> tuple[int, Tensor]:
    """Build a message: the changed blocks with their indices, or all bytes if that is not more.

    Args:
        packed: uint8, a multiple of ``BLOCK``.
        changed: bool, one per block of ``packed``; None: nothing was sent before.
        runs: byte ranges ``[begin, end)`` of the message's pieces in ``packed``.

    Returns:
        Number of blocks (or ``ALL_BLOCKS``), and uint8 content: the blocks' indices in the message
        (int32, padded to a multiple of ``BLOCK``), then the blocks.
    """
    if changed is not None:
        mask = _joined([changed[begin // BLOCK : end // BLOCK] for begin, end in runs])
        index = mask.nonzero().flatten()
        blocks = len(index)
        if message_bytes(blocks, 0) < len(mask) * BLOCK:
            content = packed.new_zeros(message_bytes(blocks, 0))
            content[: blocks * INDEX_BYTES].view(torch.int32).copy_(index)
            full = _joined([packed[begin:end] for begin, end in runs]).view(-1, BLOCK)
            content[len(content) - blocks * BLOCK :].view(-1, BLOCK).copy_(full[index])
            return blocks, content
    return ALL_BLOCKS, _joined([packed[begin:end] for begin, end in runs])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
