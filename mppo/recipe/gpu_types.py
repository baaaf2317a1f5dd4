"""GPU types by name: memory, device name and compute capability."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mppo.recipe.errors import ConfigError, ConfigIssue, nearest

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class GpuType:
    """A type of GPU; name and total memory are those that the driver reports."""

    name: str
    nbytes: int
    capability: tuple[int, int] = (9, 0)


GPU_TYPES = {
    "a100-40gb": GpuType("NVIDIA A100-SXM4-40GB", 40_326 * MIB, (8, 0)),
    "a100-80gb": GpuType("NVIDIA A100-SXM4-80GB", 81_038 * MIB, (8, 0)),
    "h100-80gb": GpuType("NVIDIA H100 80GB HBM3", 81_079 * MIB),
    "h20-96gb": GpuType("NVIDIA H20", 97_280 * MIB),
    "h200-141gb": GpuType("NVIDIA H200", 143_155 * MIB),
    "b200-180gb": GpuType("NVIDIA B200", 182_642 * MIB, (10, 0)),
    "l40s-48gb": GpuType("NVIDIA L40S", 45_478 * MIB, (8, 9)),
}
"""Total memory as the driver reports it, about 1% below the label."""


DEFAULT_GPU = "h100-80gb"
"""The GPU of a plan if neither the recipe nor the command line names one."""


def find_gpu(name: str, key: str = "--gpu") -> GpuType:
    """Find a GPU type by its name in ``GPU_TYPES``, which may lack the memory if one type has it,
    such as h100, or make one from GiB such as 79.2 or 64GiB. ``key`` gives the name, for the
    message.

    Raises:
        ConfigError: ``name`` is neither.
    """
    if name.lower() in GPU_TYPES:
        return GPU_TYPES[name.lower()]
    of_memory = [known for key, known in GPU_TYPES.items() if key.startswith(f"{name.lower()}-")]
    if len(of_memory) == 1:
        return of_memory[0]
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:gib)?", name.lower())
    if number and float(number[1]) > 0:
        return GpuType(f"GPU of {float(number[1]):g} GiB", int(float(number[1]) * GIB))
    close = nearest(name.lower(), GPU_TYPES)
    meant = f" (did you mean {close}?)" if close else ""
    fix = f"choose one of {', '.join(GPU_TYPES)}, or give its memory in GiB, such as 79.2GiB"
    raise ConfigError([ConfigIssue(key, name, f"unknown GPU{meant}", fix)])
