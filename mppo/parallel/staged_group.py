"""A process group for ranks that share a GPU: gloo, with CUDA tensors staged through host memory.

NCCL refuses two ranks on one GPU, and gloo has no messages and few collectives for CUDA tensors.
Here each operation copies its tensors to the host, waits for the copy, runs gloo on the host's
copies, and copies the results back when the caller waits for them. That is slow; it executes the
CUDA code of every layout on a single GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

BACKEND = "staged"
"""Name of the backend in torch.distributed."""

_SAME_NAMES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "scatter",
)  # fmt: skip
_COLLECTIVES = {name: name for name in _SAME_NAMES} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""gloo's operations by the name that torch.distributed calls; torch 2.13 has new names for some.
All write the tensors of their first argument."""

_SEVERAL = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""gloo's operation for each pair of two lists of tensors, likewise by the name that is called."""


class StagedWork:
    """Handle of a started operation, like ``torch.distributed.Work``; ``results`` are pairs of a
    tensor and the host's copy with its result."""

    def __init__(self, works: Iterable[Any], results: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._works, self._results = list(works), list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        for tensor, copy in self._results:
            tensor.detach().copy_(copy)  # a leaf may require its gradient
        self._results.clear()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class StagedGroup(dist.ProcessGroup):
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # its stub lacks this form
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    @staticmethod
    def stages(tensor: Tensor) -> bool:
        return tensor.is_cuda

    @property
    def group_name(self) -> str:
        """Its name; torch's own property asks for a backend in C++."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing: operations start one by one."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return StagedWork(())

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:
        """Start to send; the tensors may be changed at once."""
        copies = [self._copy(tensor) if self.stages(tensor) else tensor for tensor in tensors]
        return StagedWork([self._gloo.send(copies, dstRank, tag)])

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(*(() if opts is None else (opts,)))

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())

    def _run(self, name: str, written: Any, *others: Any) -> StagedWork:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def staged(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [staged(part) for part in value]
            if not (isinstance(value, Tensor) and self.stages(value)):
                return value
            if id(value) not in copies:
                copies[id(value)] = value, self._copy(value)
            return copies[id(value)][1]

        hosted = staged(written)
        results = list(copies.values())
        work = getattr(self._gloo, name)(hosted, *(staged(value) for value in others))
        return StagedWork([work], results)


def _operation(name: str) -> Callable[..., StagedWork]:
    def operation(self: StagedGroup, written: Any, *others: Any) -> StagedWork:
        return self._run(name, written, *others)

    return operation


def _several(name: str) -> Callable[..., StagedWork]:
    def operations(self: StagedGroup, written: Any, read: Any, *others: Any) -> StagedWork:
        pairs = zip(written, read, strict=True)
        return StagedWork([self._run(name, *pair, *others) for pair in pairs])

    return operations


for _make, _names in ((_operation, _COLLECTIVES), (_several, _SEVERAL)):
    for _called, _name in _names.items():
        setattr(StagedGroup, _called, _make(_name))


def register(name: str = BACKEND, group: type[StagedGroup] = StagedGroup) -> str:
    """Register the backend in torch.distributed; idempotent."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, group, devices=["cpu", "cuda"])
    return name
