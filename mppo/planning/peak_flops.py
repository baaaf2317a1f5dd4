"""What a device could do at best: dense bfloat16 TFLOP/s by the name of the GPU."""

from __future__ import annotations

import re

PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.4),
    (("GH200",), 989.4),
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.4),
    (("H800", "PCIe"), 756.0),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L20",), 119.5),
    (("L4",), 121.0),
)
"""Words of a GPU's name to its peak without sparsity, as NVIDIA publishes it; not measured. The
first row of which all words occur holds."""


def peak_tflops(name: str) -> float | None:
    """The peak of the device of this name (``mppo.parallel.device.name``), in TFLOP/s.

    Returns:
        None where it is not known: a CPU, a part of a GPU (MIG), a GPU not in ``PEAKS``.
    """
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((peak for wanted, peak in PEAKS if words.issuperset(wanted)), None)
