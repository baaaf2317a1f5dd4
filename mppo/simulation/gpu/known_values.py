"""Values of simulated tensors, where they follow from the host alone.

A tensor on the simulated GPU has no data. But sequence bounds, indices, masks and a router's
choices come from the host or are computed from what did, and they decide shapes. Their storages
carry real CPU memory of the same size: ``storage.values``. All views of a storage share it, so an
operation in place on one is seen by the others, as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

MOST_BYTES = 64 << 20
"""Largest integer tensor whose values are kept."""
MOST_FLOATS = 4096
"""Largest floating-point tensor whose values are kept."""
CPU = torch.device("cpu")
_RANDOM = ("rand", "bernoulli", "normal", "uniform", "dropout", "exponential", "multinomial")
_OVERWRITING = ("aten::copy_", "aten::zero_", "aten::fill_")


class UnknownValue(RuntimeError):
    """The program reads a value that only a GPU would know, and goes on by it."""


def known(tensor: Tensor) -> Tensor | None:
    """The values of a simulated tensor as a CPU tensor over their memory, or None."""
    storage: Any = tensor.untyped_storage()
    values = getattr(storage, "values", None)
    if values is None:
        return None
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())


def attach_values(tensor: Tensor, value: Tensor) -> None:
    """Give a simulated tensor's new storage its values."""
    storage: Any = tensor.untyped_storage()
    same = value.stride() == tensor.stride() and value.dtype == tensor.dtype
    if not same or value.storage_offset() or value.untyped_storage().nbytes() < storage.nbytes():
        laid = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        value = laid.copy_(value)
    storage.values = value.untyped_storage()


def forget(tensors: Iterable[Any]) -> None:
    """The values of these storages are no longer known."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            storage: Any = tensor.untyped_storage()
            storage.values = None


def worth_keeping(numel: int, dtype: torch.dtype) -> bool:
    """Whether the values of such a tensor may decide anything, and are few enough to compute."""
    if dtype.is_floating_point or dtype.is_complex:
        return numel <= MOST_FLOATS
    return numel * dtype.itemsize <= MOST_BYTES


def evaluate_known(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], fakes: list[FakeTensor]
) -> Any:
    """The operation on known values; None where an input's are unknown or too many.

    Operations in place change the values they write to, or make them unknown.
    """
    schema = func._schema
    overwrites = schema.name in _OVERWRITING
    if overwrites and fakes and fakes[0] is args[0] and known(args[0]) is None:
        _begin_values(args[0])
    values = {id(x): known(x) for x in fakes}
    if all(v is not None for v in values.values()) and _is_evaluated(func, args, kwargs, fakes):
        flat, spec = tree_flatten((list(args), kwargs))
        flat = [values.get(id(x), x) if isinstance(x, FakeTensor) else _on_host(x) for x in flat]
        on_host, keywords = tree_unflatten(flat, spec)
        keywords.pop("pin_memory", None)
        try:
            return func(*on_host, **keywords)
        except (RuntimeError, NotImplementedError):
            pass  # an operation that the CPU does not have: its values stay unknown
    if schema.is_mutable:
        forget(written(func, args, kwargs))
    return None


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    """The arguments an operation writes to."""
    values = [*args, *(kwargs.get(info.name) for info in func._schema.arguments[len(args) :])]
    for info, value in zip(func._schema.arguments, values):
        if info.alias_info is not None and info.alias_info.is_write:
            yield from tree_flatten(value)[0]


def _begin_values(tensor: Tensor) -> None:
    """Memory for values that are about to be written over all of a small storage."""
    storage: Any = tensor.untyped_storage()
    whole = tensor.numel() * tensor.element_size() == storage.nbytes()
    if whole and worth_keeping(tensor.numel(), tensor.dtype):
        storage.values = torch.UntypedStorage(storage.nbytes())


def _is_evaluated(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], fakes: list[FakeTensor]
) -> bool:
    name = func._schema.name
    if "empty" in name or any(part in name for part in _RANDOM):
        return False
    if fakes:
        return all(x.numel() * x.element_size() <= MOST_BYTES for x in fakes)
    flat = tree_flatten((list(args), kwargs))[0]
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if tensors:
        return all(worth_keeping(x.numel(), x.dtype) for x in tensors)
    # a factory: its sizes are among the integers it is given
    dtype = next((x for x in flat if isinstance(x, torch.dtype)), torch.float32)
    sizes = [x for x in flat if isinstance(x, int) and not isinstance(x, bool)]
    return worth_keeping(math.prod(max(x, 1) for x in sizes), dtype)


def _on_host(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value
