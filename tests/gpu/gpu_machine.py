"""What the checks on GPUs run with: this repository, its launcher, and the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TRAIN = str(ROOT / "mppo" / "train.py")
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "transformer-engine", "flash-attn")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def torch_problem() -> str | None:
    """Why this interpreter cannot run the checks; None: it has torch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return (
            f"{sys.executable} cannot import torch ({error}): install torch for CUDA "
            "(docs/install.md), or choose an interpreter that has it by MPPO_PYTHON"
        )
    return None


def describe_machine(commit: str = "") -> dict[str, str]:
    """GPUs, driver and versions; the commit is ``commit`` or, if that is empty, git's."""

    def output(*command: str) -> str:
        if shutil.which(command[0]) is None:
            return ""
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    query = "--query-gpu=name,memory.total,driver_version"
    gpus = output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    commit = commit or output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")

    def version(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"no {package}"

    return {
        "date": datetime.now().isoformat(timespec="minutes"),
        "host": platform.node(),
        "commit": commit or "unknown",
        "GPUs": f"{len(gpus)} x {gpus[0]}" if gpus else "none",
        "Python": platform.python_version(),
        "packages": ", ".join(map(version, PACKAGES)),
    }
