"""A flat range of a tensor as rectangles in the tensor's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Rectangle:
    """A block of a tensor whose elements are contiguous in memory; ``start`` is the index of its
    first element in the flattened tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Cut elements ``start`` to ``stop`` of the flattened tensor into rectangles. There are at most
    ``2 n - 1`` for n dimensions: the end of a row, complete rows, the start of a row; the
    incomplete rows are cut in the same way along the next dimension. The rectangles are disjoint
    and in order; 0 <= start <= stop <= number of elements."""
    assert 0 <= start <= stop <= prod(shape)
    if start == stop:
        return []
    if len(shape) == 0:
        return [Rectangle((), (), 0)]
    if len(shape) == 1:
        return [Rectangle((start,), (stop - start,), start)]
    row = prod(shape[1:])
    first_full, last_full = -(-start // row), stop // row
    if first_full > last_full:
        return _inside_row(shape, start, stop)
    found = []
    if start < first_full * row:
        found += _inside_row(shape, start, first_full * row)
    if first_full < last_full:
        offset = (first_full,) + (0,) * (len(shape) - 1)
        full = (last_full - first_full, *shape[1:])
        found.append(Rectangle(offset, full, first_full * row))
    if last_full * row < stop:
        found += _inside_row(shape, last_full * row, stop)
    return found


def _inside_row(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    row = prod(shape[1:])
    index = start // row
    inner = rectangles(shape[1:], start - index * row, stop - index * row)
    return [Rectangle((index, *r.offset), (1, *r.shape), r.start + index * row) for r in inner]
