"""Binding a rank to the cores near its GPU.

On a machine with several NUMA nodes, a core reaches the memory and the GPUs of its own node faster.
Memory is allocated on the node of the core that first writes it, so that binding the cores also
places pinned buffers near the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys")

_before: frozenset[int] | None = None
"""The cores of this process before ``bind``; None: it was not bound."""


def cores_near(gpu: str, allowed: frozenset[int], sysfs: Path = SYSFS) -> frozenset[int]:
    """The cores of the NUMA node of a GPU, given by its PCI address, such as ``0000:3b:00.0``;
    ``allowed`` if the kernel does not know the node, or the node has none of them."""
    try:
        node = int((sysfs / "bus/pci/devices" / gpu.lower() / "numa_node").read_text())
        cores = _core_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return allowed
    return allowed & cores or allowed


def _core_list(text: str) -> frozenset[int]:
    """The cores of a list such as ``0-3,8-11``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bind(gpu: str, sysfs: Path = SYSFS) -> None:
    """Bind this process to the cores near its GPU; no effect where the system cannot. Call it
    before the process has further threads, which keep the cores they started with."""
    global _before
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = frozenset(os.sched_getaffinity(0))
    near = cores_near(gpu, allowed, sysfs)
    if near != allowed:
        _before = allowed
        os.sched_setaffinity(0, near)


@contextmanager
def unbound() -> Iterator[None]:
    """Let processes that this thread starts in this context use the cores of before ``bind``. A
    rollout server may use GPUs of several NUMA nodes."""
    if _before is None:
        yield
        return
    near = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, near)
