"""A fixed piece of arithmetic, by whose duration a slow rank is found."""

from __future__ import annotations

import time

import torch

from mppo.parallel import device

_SIZE = {True: 1024, False: 192}
"""Rows of the matrices, on a GPU and on a CPU."""
_REPEATS = 3


def probe_ms() -> float:
    """Milliseconds for the product of two matrices on this rank's device: the least of three."""
    size = _SIZE[device.is_cuda()]
    matrix = torch.ones(size, size, device=device.device())
    times = []
    for _ in range(_REPEATS):
        device.synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)
