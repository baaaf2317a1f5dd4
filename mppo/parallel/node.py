"""This node: its GPUs and their driver, the cores near a GPU, its memory, and its packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from mppo.safety.input_error import InputError

_LEAST_DRIVER = {12: 525, 13: 580}
"""Oldest driver branch for a major version of CUDA (NVIDIA, "CUDA Compatibility")."""
_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of ``CUDA_VISIBLE_DEVICES`` that hide all GPUs on purpose."""
_DEVICE_FILES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")


def gpus_of_node(environ: Mapping[str, str] | None = None, files: Path = _DEVICE_FILES) -> int:
    """Number of GPUs that this process should be able to use: the larger of the device files
    ``nvidia0``, ... and ``SLURM_GPUS_ON_NODE``; 0 if ``CUDA_VISIBLE_DEVICES`` hides them."""
    environ = os.environ if environ is None else environ
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _HIDDEN:
        return 0
    found = sum(1 for file in files.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(found, int(given) if given.isdecimal() else 0)


def driver_version(file: Path = _DRIVER) -> str:
    """Version of the NVIDIA driver, such as ``580.95.05``; empty if there is none."""
    try:
        text = file.read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""


def driver_fault(driver: str, cuda: str | None) -> str:
    """Why a driver is too old for torch's CUDA, such as ``13.0``; empty if not, or unknown."""
    if not driver or not cuda:
        return ""
    needed = _LEAST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) >= needed:
        return ""
    return f"torch's CUDA {cuda} needs driver {needed} or newer, and this node has {driver}"


def unusable_gpus(gpus: int, devices: int, driver: str, cuda: str | None) -> tuple[str, str] | None:
    """Say why torch sees no GPU on a node that has some; None if it sees one or there is none."""
    if devices or not gpus:
        return None
    if cuda is None:
        return "torch is built for the CPU", 'install torch for CUDA: pip install "mppo[gpu]"'
    if fault := driver_fault(driver, cuda):
        return fault, "update the driver, or install torch for an older CUDA"
    return "torch sees none of them", "see what nvidia-smi says"


def check_gpus() -> None:
    """Raise InputError if this node has GPUs that torch cannot use: the CPU would be used."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = gpus_of_node()
    fault = unusable_gpus(gpus, devices, driver_version(), torch.version.cuda)
    if fault is not None:
        why, fix = fault
        raise InputError(
            f"this node has {gpus} GPUs, but {why}: {fix}; MPPO_DEVICE=cpu trains on the CPU"
        )


SYSFS = Path("/sys")

_before: frozenset[int] | None = None
"""The cores of this process before ``bind_cores``; None: it was not bound."""


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


def bind_cores(gpu: str, sysfs: Path = SYSFS) -> None:
    """Bind this process to the cores near its GPU; no effect where the system cannot.

    Cores reach the memory and the GPUs of their own NUMA node faster. Memory is allocated on the
    node of the core that first writes it: pinned buffers come to lie near the GPU, too. Call it
    before the process has further threads, which keep the cores they started with.
    """
    global _before
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = frozenset(os.sched_getaffinity(0))
    near = cores_near(gpu, allowed, sysfs)
    if near != allowed:
        _before = allowed
        os.sched_setaffinity(0, near)


@contextmanager
def unbound_cores() -> Iterator[None]:
    """Let processes that this thread starts in this context use the cores of before ``bind_cores``.
    A rollout server may use GPUs of several NUMA nodes."""
    if _before is None:
        yield
        return
    near = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, near)


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


@dataclass(frozen=True)
class Package:
    """A package's versions: the one that the tests run with (empty: they do not run it), and those
    with which mppo starts; others lack modules or fields that it uses."""

    tested: str
    works: str


PACKAGES = {
    "torch": Package("2.13.0", ">=2.6"),
    "megatron-core": Package("0.16.1", ">=0.16.1,<0.17"),
    "transformers": Package("5.12.1", ">=5.0"),
    "sglang": Package("0.5.21", ">=0.5.21,<0.6"),
    "transformer-engine": Package("", ">=2.9,<2.12"),
}
"""By name on PyPI; pyproject.toml has the same versions."""


def installed_version(package: str) -> str:
    """Version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_versions(installed: dict[str, str] | None = None) -> str:
    """Check that mppo works with the installed packages (name and version; None: this
    environment's). Returns one line on packages of other versions than the tested ones, or an empty
    one. InputError: mppo does not work with a version."""
    if installed is None:
        installed = {name: installed_version(name) for name in PACKAGES}
    found = {name: text for name, text in installed.items() if text}
    unfit = [
        f"{name} {text} (needs {PACKAGES[name].works})"
        for name, text in found.items()
        if not _fits(PACKAGES[name].works, text)
    ]
    if unfit:
        raise InputError(
            f"mppo does not work with {', '.join(unfit)}: "
            'install the tested versions with pip install -e ".[gpu]", or ".[cpu]" without a GPU'
        )
    others = [
        f"{name} {text} (tested: {PACKAGES[name].tested})"
        for name, text in found.items()
        if PACKAGES[name].tested and not _fits(f"=={PACKAGES[name].tested}", text)
    ]
    return f"not the tested versions: {', '.join(others)}" if others else ""


def _fits(wanted: str, text: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(text, prereleases=True)
    except InvalidVersion:  # a vendor's own numbering
        return True
