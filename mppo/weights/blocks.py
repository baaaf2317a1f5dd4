"""A shard as a list of blocks: intervals of Hugging Face tensors, in the order of the shard.

All intervals are along one dimension. A block is ``length`` rows (or columns) from ``start`` of
source tensor number ``source``; source ``ZERO`` stands for zeros (vocabulary padding).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mppo.safety.input_error import InputError

BlockKind = Literal["copy", "qkv", "gated", "vocab"]
ZERO = -1


@dataclass(frozen=True)
class Block:
    """``length`` entries from ``start`` of source tensor number ``source``."""

    source: int
    start: int
    length: int


def padded_vocab_size(vocab: int, tp: int) -> int:
    """Smallest multiple of ``tp`` that holds ``vocab`` rows."""
    return -(-vocab // tp) * tp


@lru_cache(maxsize=4096)
def shard_blocks(
    kind: BlockKind,
    lengths: tuple[int, ...],
    rank: int,
    size: int,
    groups: int = 1,
    padded: int = 0,
) -> tuple[Block, ...]:
    """The blocks of one shard, in its order.

    Args:
        kind: ``copy``: one source, cut evenly; ``gated``: each source, or each half of the only
            one, cut evenly, the parts stacked; ``qkv``: sources interleaved by key-value head, then
            cut; ``vocab``: padded with zeros, then cut.
        lengths: length of each source along the sharded dimension.
        groups: number of key-value heads (``qkv`` only).
        padded: total rows after padding (``vocab`` only).

    Raises:
        InputError: a length is not divisible by the number of shards or heads.
    """
    if kind == "gated":
        wholes = [Block(source, 0, length) for source, length in enumerate(lengths)]
        if len(wholes) == 1:
            half = _part(lengths[0], 2)
            wholes = [Block(0, 0, half), Block(0, half, half)]
        shares = [(whole, _part(whole.length, size)) for whole in wholes]
        return tuple(Block(w.source, w.start + rank * share, share) for w, share in shares)
    if kind == "qkv":
        parts = [_part(length, groups) for length in lengths]
        flat = [Block(s, g * part, part) for g in range(groups) for s, part in enumerate(parts)]
    elif kind == "vocab":
        if padded < lengths[0]:
            raise InputError(f"{padded} rows cannot hold a vocabulary of {lengths[0]}")
        flat = [Block(0, 0, lengths[0]), Block(ZERO, 0, padded - lengths[0])]
    else:
        flat = [Block(0, 0, lengths[0])]
    share = _part(sum(block.length for block in flat), size)
    return _cut(flat, rank * share, share)


def _part(length: int, size: int) -> int:
    if length % size:
        raise InputError(f"a dimension of {length} cannot be cut into {size} equal parts")
    return length // size


def _cut(flat: list[Block], first: int, length: int) -> tuple[Block, ...]:
    """The blocks inside ``[first, first + length)`` of the concatenation of ``flat``."""
    out, position, last = [], 0, first + length
    for block in flat:
        begin, end = max(position, first), min(position + block.length, last)
        if begin < end:
            out.append(Block(block.source, block.start + begin - position, end - begin))
        position += block.length
    return tuple(out)
