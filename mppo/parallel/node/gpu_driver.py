"""GPUs and driver of this node as the system shows them, whether or not torch can use them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

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
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = gpus_of_node()
    fault = unusable_gpus(gpus, devices, driver_version(), torch.version.cuda)
    if fault is not None:
        why, fix = fault
        raise InputError(
            f"this node has {gpus} GPUs, but {why}: {fix}; MPPO_DEVICE=cpu trains on the CPU"
        )
