"""Values of simulated tensors that depend on host data only.

A tensor on the simulated GPU has no data. But sequence bounds, indices, masks and a router's
choices are host data or computed from host data, and they determine shapes. The storages of such
tensors carry real CPU memory of the same size: ``storage.values``. All views of a storage share it,
so an in-place operation on one view changes the others, as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

MOST_BYTES = 64 << 20
"""Largest integer tensor, in bytes, whose values are kept."""
MOST_FLOATS = 4096
"""Largest floating-point tensor, in elements, whose values are kept."""
CPU = torch.device("cpu")
_RANDOM = ("rand", "bernoulli", "normal", "uniform", "dropout", "exponential", "multinomial")
_NEVER_READ = ("aten::cos", "aten::sin")
"""Operations that no control flow and no shape depends on: their values, rotary angles, are not
computed."""
_OVERWRITING = ("aten::copy_", "aten::zero_", "aten::fill_")


class UnknownValue(RuntimeError):
    """The control flow of the simulated code depends on a value that only a GPU has."""


def is_known(tensor: Tensor) -> bool:
    """Whether the values of a simulated tensor are known."""
    return getattr(tensor.untyped_storage(), "values", None) is not None


def known(tensor: Tensor) -> Tensor | None:
    """Return a CPU tensor that shares the memory of a tensor's known values; None: unknown."""
    storage: Any = tensor.untyped_storage()
    values = getattr(storage, "values", None)
    if values is None:
        return None
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())


def attach_values(tensor: Tensor, value: Tensor) -> None:
    """Attach known values to the storage of a simulated tensor."""
    storage: Any = tensor.untyped_storage()
    same = value.stride() == tensor.stride() and value.dtype == tensor.dtype
    if not same or value.storage_offset() or value.untyped_storage().nbytes() < storage.nbytes():
        laid = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        value = laid.copy_(value)
    storage.values = value.untyped_storage()


def untouched_zeros(nbytes: int) -> Tensor:
    """Zeros, uint8, which take no memory of the host until they are written."""
    return torch.from_numpy(numpy.zeros(max(nbytes, 1), numpy.uint8))[:nbytes]


def forget(tensors: Iterable[Any]) -> None:
    """Mark the values of the tensors' storages as unknown."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            storage: Any = tensor.untyped_storage()
            storage.values = None


def is_small(numel: int, dtype: torch.dtype) -> bool:
    """Whether a tensor of this size and dtype is small enough to keep its values."""
    if dtype.is_floating_point or dtype.is_complex:
        return numel <= MOST_FLOATS
    return numel * dtype.itemsize <= MOST_BYTES


def evaluate_known(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], fakes: list[FakeTensor]
) -> Any:
    """Execute an operation on known values.

    An in-place operation changes the known values of its target, or marks them as unknown.

    Args:
        func: the operation.
        args, kwargs: its arguments.
        fakes: the simulated tensors among the arguments.

    Returns:
        The result on the CPU; None if the values of an input are unknown or too large.
    """
    schema = func._schema
    if schema.name in _OVERWRITING and fakes and fakes[0] is args[0] and known(args[0]) is None:
        _allocate_values(args[0])
    if all(is_known(x) for x in fakes) and _is_evaluated(func, args, kwargs, fakes):
        values = {id(x): known(x) for x in fakes}
        flat, spec = tree_flatten((list(args), kwargs))
        flat = [values.get(id(x), x) if isinstance(x, FakeTensor) else _on_host(x) for x in flat]
        on_host, keywords = tree_unflatten(flat, spec)
        keywords.pop("pin_memory", None)
        try:
            return func(*on_host, **keywords)
        except (RuntimeError, NotImplementedError):
            pass  # no CPU kernel: the result stays unknown
    if schema.is_mutable:
        forget(written(func, args, kwargs))
    return None


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Yield the arguments to which an operation writes."""
    values = [*args, *(kwargs.get(info.name) for info in func._schema.arguments[len(args) :])]
    for info, value in zip(func._schema.arguments, values):
        if info.alias_info is not None and info.alias_info.is_write:
            yield from tree_flatten(value)[0]


def _allocate_values(tensor: Tensor) -> None:
    """Allocate memory for values if an operation overwrites all of a small storage."""
    storage: Any = tensor.untyped_storage()
    complete = tensor.numel() * tensor.element_size() == storage.nbytes()
    if complete and is_small(tensor.numel(), tensor.dtype):
        storage.values = torch.UntypedStorage(storage.nbytes())


def _is_evaluated(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], fakes: list[FakeTensor]
) -> bool:
    name = func._schema.name
    if name in _NEVER_READ or "empty" in name or any(part in name for part in _RANDOM):
        return False
    if fakes:
        return all(x.numel() * x.element_size() <= MOST_BYTES for x in fakes)
    flat = tree_flatten((list(args), kwargs))[0]
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if tensors:
        return all(is_small(x.numel(), x.dtype) for x in tensors)
    # a factory function: its sizes are among its integer arguments
    dtype = next((x for x in flat if isinstance(x, torch.dtype)), torch.float32)
    sizes = [x for x in flat if isinstance(x, int) and not isinstance(x, bool)]
    return is_small(math.prod(max(x, 1) for x in sizes), dtype)


def _on_host(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value
