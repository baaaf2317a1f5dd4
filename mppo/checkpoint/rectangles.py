"""A flat range of a tensor as rectangles, which have a place in the tensor's own coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Rectangle:
    """A block of a tensor whose elements lie together in memory.

    Args:
        offset: of the block, along each dimension.
        shape: of the block.
        start: its first element's place in the flattened tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Cut elements ``start`` to ``stop`` of the flattened tensor into rectangles.

    At most ``2 n - 1`` for n dimensions: the rest of a row, whole rows, the beginning of a row, and
    so for every dimension.

    Args:
        shape: of the tensor.
        start, stop: 0 <= start <= stop <= number of elements.

    Returns:
        Disjoint rectangles in order, together exactly the range.
    """
    assert 0 <= start <= stop <= prod(shape)
    if start == stop:
        return []
    if len(shape) == 0:
        return [Rectangle((), (), 0)]
    if len(shape) == 1:
        return [Rectangle((start,), (stop - start,), start)]
    row = prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:
        return _inside_row(shape, start, stop)
    found = []
    if start < first_whole * row:
        found += _inside_row(shape, start, first_whole * row)
    if first_whole < last_whole:
        offset = (first_whole,) + (0,) * (len(shape) - 1)
        whole = (last_whole - first_whole, *shape[1:])
        found.append(Rectangle(offset, whole, first_whole * row))
    if last_whole * row < stop:
        found += _inside_row(shape, last_whole * row, stop)
    return found


def _inside_row(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    row = prod(shape[1:])
    index = start // row
    inner = rectangles(shape[1:], start - index * row, stop - index * row)
    return [Rectangle((index, *r.offset), (1, *r.shape), r.start + index * row) for r in inner]
