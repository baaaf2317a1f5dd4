"""Activation offloading: host memory holds activations between forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

SMALLEST = 1 << 10
"""Elements from which a tensor is moved; copying a smaller one costs more than it saves."""


@contextmanager
def offloaded_activations(module: torch.nn.Module) -> Iterator[None]:
    """Move tensors that autograd saves to host memory until the backward pass needs them.

    Parameters and buffers of ``module`` are not moved. Copies use pinned memory and run in stream
    order. On the CPU they are copies within host memory, which only tests use.
    """
    kept = {x.untyped_storage().data_ptr() for x in chain(module.parameters(), module.buffers())}

    def pack(x: Tensor):
        if x.numel() < SMALLEST or x.untyped_storage().data_ptr() in kept:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
        return x.device, host.copy_(x, non_blocking=True)

    def unpack(saved):
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
