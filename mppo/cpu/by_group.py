"""Values that belong to a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class ByGroup(Generic[T]):
    """A value for each process group, made at its first use.

    Args:
        make: makes the value of a group; may be collective.
    """

    def __init__(self, make: Callable[[dist.ProcessGroup], T]) -> None:
        self._make = make
        self._known: dict[dist.ProcessGroup, T] = {}
        self._world: dist.ProcessGroup | None = None

    def of(self, group: dist.ProcessGroup | None) -> T:
        """The value of a group; None is the default one."""
        world = dist.group.WORLD
        if self._world is not world:  # values belong to a world that was destroyed
            self._known.clear()
            self._world = world
        group = group or world
        assert group is not None, "torch.distributed is initialised"
        if group not in self._known:
            self._known[group] = self._make(group)
        return self._known[group]
