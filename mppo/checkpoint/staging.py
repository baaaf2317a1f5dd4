"""Host memory for tensors that a background save writes while training changes them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mppo.weights.hf.safetensors_file import byte_view


class HostBuffers:
    """Copies of tensors, in memory that is reused by the next save. Allocating memory would cost
    more than the copy: the system maps it page by page, and pins it page by page for a GPU to write
    to it. One save at a time may use the buffers."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host; the copy is complete after ``device.synchronize()``. ``key``
        identifies the tensor, the same in every save."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = not tensor.is_cpu
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def give_own_storages(sharded_state: dict | list) -> None:
    """Give every host tensor a storage of exactly its own elements, over the same memory.
    torch.save writes a tensor's complete storage, so Megatron's writer copies any tensor that is
    part of a larger one. Nearly all optimizer states and parameters are."""
    for entry in nested_values(sharded_state):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            entry.data = _same_memory(entry.data)


def _same_memory(tensor: Tensor) -> Tensor:
    complete = tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize
    if complete or not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    own = torch.frombuffer(byte_view(octets), dtype=torch.uint8)
    return own.view(tensor.dtype).view(tensor.shape)
