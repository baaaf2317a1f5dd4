"""Host memory for tensors that a background save writes while training changes them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor


class HostBuffers:
    """Copies of tensors, in memory that is kept from one save to the next.

    Fresh memory costs more than the copy: the system hands it out page by page, and locks it page
    by page where a GPU is to write to it. One save at a time may use the buffers.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """A copy on the host, complete after ``device.synchronize()``.

        Args:
            key: what the tensor is, the same in every save.
            tensor: on any device.
        """
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = not tensor.is_cpu
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def stand_alone(sharded_state: dict) -> None:
    """Give every tensor on the host a storage of its own size over the same memory.

    Megatron's writer copies a tensor that is part of a larger storage, which would all be written.
    Optimizer states and parameters are nearly all such parts.
    """
    for entry in nested_values(sharded_state):
        if isinstance(entry, ShardedTensor) and entry.data is not None:
            entry.data = _same_memory(entry.data)


def _same_memory(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize
    if whole or not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    return torch.from_numpy(octets.numpy()).view(tensor.dtype).view(tensor.shape)
