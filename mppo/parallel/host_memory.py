"""Memory that this process's node lets it use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PHYSICAL = "physical memory"
LIMIT = "limit of the cgroup"


def host_memory() -> tuple[int, str]:
    """Bytes that processes here may use, and which of the two limits that is. A container, or a
    SLURM job with ``--mem``, has a cgroup with a limit below the physical memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    if limit is not None and limit < physical:
        return limit, LIMIT
    return physical, PHYSICAL


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit of this process's cgroup and its parents; None without one."""
    found: list[int] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                found += _limits(root / "sys/fs/cgroup", path, "memory.max")
            elif "memory" in controllers.split(","):
                folder = root / "sys/fs/cgroup/memory"
                found += _limits(folder, path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Limits of a cgroup and its parents; a container sees its own as the mount's root."""
    folder = mount / path.strip("/")
    found = []
    for place in (folder, *folder.parents):
        if place.is_relative_to(mount):
            with suppress(OSError, ValueError):  # "max", or a file that is not there
                found.append(int((place / name).read_text()))
    return found
