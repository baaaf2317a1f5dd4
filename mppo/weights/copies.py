"""Many copies between tensors with few operations: on a GPU, each operation starts a kernel.

Copies between two buffers are described by numbers (``BufferCopy``). Copies that repeat at equal
distances, such as the same shard of every rank, expert or layer, are folded into one strided copy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtypes as which bytes are copied, by size; wide ones take fewer memory accesses."""


@dataclass(frozen=True)
class BufferCopy:
    """A copy of equally long runs of bytes from one buffer to another. ``sizes`` are numbers of
    repetitions, outermost first, and last the length of a run in bytes; the steps are distances in
    bytes between repetitions, one for each of ``sizes`` but the last."""

    source: int
    target: int
    sizes: tuple[int, ...]
    source_steps: tuple[int, ...] = ()
    target_steps: tuple[int, ...] = ()

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copy; both are uint8, from the start of their storages, their length a multiple of 8."""
        steps = (*self.source_steps, *self.target_steps)
        unit = math.gcd(self.source, self.target, self.sizes[-1], *steps, 8)
        sizes = (*self.sizes[:-1], self.sizes[-1] // unit)

        def view(buffer: Tensor, first: int, steps: tuple[int, ...]) -> Tensor:
            strides = (*(step // unit for step in steps), 1)
            return buffer.view(_UNITS[unit]).as_strided(sizes, strides, first // unit)

        into = view(target, self.target, self.target_steps)
        into.copy_(view(source, self.source, self.source_steps))


@dataclass(frozen=True)
class Slice:
    """Part of a contiguous tensor in a buffer: ``first`` byte of the tensor, and ``start`` of the
    part along the dimension in which it is sliced."""

    first: int
    shape: tuple[int, ...]
    start: int


def slice_copy(source: Slice, target: Slice, dim: int, length: int, itemsize: int) -> BufferCopy:
    """The copy of ``length`` indices along ``dim``, in which alone the tensors' shapes differ, from
    one tensor to another."""
    inner = math.prod(source.shape[dim + 1 :]) * itemsize
    outer = math.prod(source.shape[:dim])
    first, into = source.first + source.start * inner, target.first + target.start * inner
    if outer == 1:
        return BufferCopy(first, into, (length * inner,))
    steps = (source.shape[dim] * inner,), (target.shape[dim] * inner,)
    return BufferCopy(first, into, (outer, length * inner), *steps)


def folded(copies: Iterable[BufferCopy]) -> list[BufferCopy]:
    """The same copies in a smaller number, whose targets must not overlap."""
    found = _joined(copies)
    while True:
        alike: dict[tuple, list[BufferCopy]] = defaultdict(list)
        for copy in found:
            alike[copy.sizes, copy.source_steps, copy.target_steps].append(copy)
        fewer = [copy for group in alike.values() for copy in _fold(group)]
        if len(fewer) == len(found):
            return fewer
        found = fewer


def _joined(copies: Iterable[BufferCopy]) -> list[BufferCopy]:
    found: list[BufferCopy] = []
    for copy in sorted(copies, key=lambda copy: copy.target):
        if found and _is_adjacent(found[-1], copy):
            length = found[-1].sizes[0] + copy.sizes[0]
            found[-1] = BufferCopy(found[-1].source, found[-1].target, (length,))
        else:
            found.append(copy)
    return found


def _is_adjacent(first: BufferCopy, second: BufferCopy) -> bool:
    if not len(first.sizes) == len(second.sizes) == 1:
        return False
    length = first.sizes[0]
    return (first.source + length, first.target + length) == (second.source, second.target)


def _fold(group: list[BufferCopy]) -> list[BufferCopy]:
    """Fold alike copies, in the order of their targets, into repetitions at equal distances."""
    group = sorted(group, key=lambda copy: copy.target)
    found, begin = [], 0
    while begin < len(group):
        first, end, step = group[begin], begin + 1, (0, 0)
        while end < len(group):
            before, after = group[end - 1], group[end]
            distance = after.source - before.source, after.target - before.target
            if distance[0] < 0 or (end > begin + 1 and distance != step):
                break
            step, end = distance, end + 1
        found.append(_repeated(first, end - begin, step))
        begin = end
    return found


def _repeated(copy: BufferCopy, count: int, step: tuple[int, int]) -> BufferCopy:
    if count == 1:
        return copy
    return BufferCopy(
        copy.source,
        copy.target,
        (count, *copy.sizes),
        (step[0], *copy.source_steps),
        (step[1], *copy.target_steps),
    )


@torch.no_grad()
def copy_tensors(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy pairs of target and source of equal shape, contiguous ones of the same dtypes together.
    Targets must not overlap."""
    together: dict[tuple, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        if not (target.is_contiguous() and source.is_contiguous()):
            target.copy_(source)
            continue
        targets, sources = together[target.dtype, source.dtype, target.device, source.device]
        targets.append(target)
        sources.append(source)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
