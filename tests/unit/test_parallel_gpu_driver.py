"""A node with GPUs that torch cannot use is an error, not a run on the CPU."""

from __future__ import annotations

import pytest
import torch

from mppo.parallel import device
from mppo.parallel.node import (
    driver_fault,
    driver_version,
    gpus_of_node,
    unusable_gpus,
)

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.183.01"), (OPEN, "580.95.05")])
def test_the_drivers_version_is_read(tmp_path, text, version):
    file = tmp_path / "version"
    file.write_text(text)
    assert driver_version(file) == version
    assert driver_version(tmp_path / "absent") == ""


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "h100:8"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "8"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_gpus_are_counted_without_torch(tmp_path, environ, count):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of_node(environ, tmp_path) == count
    assert gpus_of_node({}, tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("driver", "cuda", "why"),
    [
        ("535.183.01", "13.0", "torch's CUDA 13.0 needs driver 580 or newer, and this node has"),
        ("535.183.01", "12.8", ""),
        ("580.95.05", "13.0", ""),
        ("470.57.02", "12.1", "needs driver 525"),
        ("", "13.0", ""),
        ("535.183.01", None, ""),
    ],
)
def test_an_old_driver_is_named(driver, cuda, why):
    fault = driver_fault(driver, cuda)
    assert why in fault
    assert bool(fault) == bool(why)


@pytest.mark.parametrize(
    ("gpus", "devices", "cuda", "fix"),
    [
        (8, 0, None, "install torch for CUDA"),
        (8, 0, "13.0", "update the driver"),
        (8, 0, "12.8", "nvidia-smi"),
        (8, 8, "12.8", None),
        (0, 0, None, None),
    ],
)
def test_gpus_that_torch_does_not_see_have_a_fix(gpus, devices, cuda, fix):
    fault = unusable_gpus(gpus, devices, "535.183.01", cuda)
    assert (fault is None) == (fix is None)
    assert fault is None or fix in fault[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU on this machine")
def test_the_run_does_not_go_to_the_cpu_by_itself(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    with pytest.raises(ValueError, match=r"this node has 8 GPUs, but .*: .*; MPPO_DEVICE=cpu"):
        device.check()
    monkeypatch.setenv("MPPO_DEVICE", "cpu")
    device.check()
