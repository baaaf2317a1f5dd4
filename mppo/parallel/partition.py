"""Dividing items of unequal cost into parts of nearly equal cost, as plain lists."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(weights: Sequence[int], parts: int, equal_count: bool = False) -> list[list[int]]:
    """Split indices into parts of nearly equal weight: largest first, into the lightest part. Parts
    are ascending and may be empty; ties resolve by index, so all ranks compute the same division.
    ``equal_count``: part sizes differ by at most one."""
    smallest, larger = divmod(len(weights), parts)
    heap = [(0, part) for part in range(parts)]
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, part = heapq.heappop(heap)
        # every larger part has been filled: a part of the smaller size takes nothing more
        while equal_count and len(result[part]) == smallest and larger == 0:
            load, part = heapq.heappop(heap)
        result[part].append(index)
        if equal_count and len(result[part]) > smallest:
            larger -= 1
        else:
            heapq.heappush(heap, (load + weights[index], part))
    return [sorted(part) for part in result]
