"""Dense bfloat16 peak of a GPU in TFLOP/s, by its name."""

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
"""Words of a GPU's name, and its peak without sparsity as published by NVIDIA (not measured). The
first row whose words all occur in the name applies."""


def peak_tflops(name: str) -> float | None:
    """Peak of a device by its name (``mppo.parallel.device.name``), TFLOP/s.

    Returns:
        None if it is unknown: a CPU, a part of a GPU (MIG), or a GPU not in ``PEAKS``.
    """
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((peak for name_words, peak in PEAKS if words.issuperset(name_words)), None)
