"""Activations kept in host memory between forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

SMALLEST = 1 << 10
"""Tensors of fewer elements stay where they are: their copies would cost more than they free."""


@contextmanager
def offloaded_activations(module: torch.nn.Module) -> Iterator[None]:
    """Move what autograd saves inside to host memory, and back when the backward pass wants it.

    Parameters and buffers of ``module`` stay. Copies go through pinned memory in the order of the
    device's work. On the CPU it is a copy in the same memory, of no use but for tests.
    """
    held = {x.untyped_storage().data_ptr() for x in chain(module.parameters(), module.buffers())}

    def pack(x: Tensor):
        if x.numel() < SMALLEST or x.untyped_storage().data_ptr() in held:
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
