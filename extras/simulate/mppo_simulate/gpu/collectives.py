"""Collectives of a simulated rank, under the assumption that all ranks hold the same tensors.

Known values stay known if this assumption determines the result. Sizes, devices and splits are
checked. Calls and bytes are counted by operation and group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map

from mppo_simulate.gpu.counters import Collective, Counters
from mppo_simulate.gpu.known_values import attach_values, forget, known
from mppo_simulate.gpu.ledger import source_line
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.records import RecordKind

_MESSAGES: dict[str, RecordKind] = {"send": "send", "recv_": "receive"}
_UNCHANGED = {"broadcast_", "send", "barrier"}
_OF_PARTS = {"allgather_": 0, "reduce_scatter_": 1}
"""Operations between one tensor and a list with a part for every rank, which may differ in size,
and which of the first two arguments the list is."""
_AGREED = _OF_PARTS | {"gather_": 1, "scatter_": 0}
"""Which of the first two arguments must have the same form on every rank, if not both."""
_ROOTED = {"broadcast_": "from", "scatter_": "from", "reduce_": "to", "gather_": "to"}
"""Operations with a root, and whether they go from it or to it."""
_IN_PLACE = {"broadcast_": True, "reduce_": False}
"""Operations on one tensor, and whether the root reads it and the others write it, or the other way
round."""


def run_collective(
    counters: Counters, recorder: RankRecorder, func: Any, args: tuple, kwargs: dict
) -> Any:
    """Execute a ``c10d`` operation on simulated tensors.

    Args:
        counters, recorder: those of the rank.
        func: the operation.
        args, kwargs: its arguments.

    Returns:
        The result of the operation, with the simulated tensors.

    Raises:
        RuntimeError: the tensors are on different devices, or their sizes or the splits of an
            all-to-all do not fit the group.
    """
    operation = func._schema.name.removeprefix("c10d::")
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    devices = {x.device.type for x in tensors}
    if len(devices) > 1:
        raise RuntimeError(
            f"{operation}: tensors on {' and '.join(sorted(devices))}, {source_line()}"
        )
    group = _group(args)
    size = group.size() if group is not None else 1
    described = group.group_desc if group is not None else ""
    if group is not None and size > 1:
        is_message = operation in _MESSAGES and not recorder.batch
        peer = args[2] if is_message else None
        counters.communicators.add((group.group_name, peer))
    kind = Collective(operation.strip("_"), described or f"{size} ranks", size)
    counters.collective(kind, sum(x.numel() * x.element_size() for x in tensors))
    _check_sizes(operation, args, group)
    record_communication(recorder, func, args, kwargs)
    # the fake process group ignores its tensors: pass empty ones on the CPU
    empty = {id(x): torch.empty(0, dtype=x.dtype) for x in tensors}
    back = {id(empty[id(x)]): x for x in tensors}
    plain_args, plain_kwargs = tree_map(lambda x: empty.get(id(x), x), (args, kwargs))
    if operation == "alltoall_base_":
        plain_args = [[] if _is_sizes(x) else x for x in plain_args]
    out = func(*plain_args, **plain_kwargs)
    _propagate(operation, args, size, recorder.reduction)
    return tree_map(lambda x: back.get(id(x), x), out)


def record_communication(recorder: RankRecorder, func: Any, args: tuple, kwargs: dict) -> None:
    """Record a ``c10d`` operation, on tensors of either device."""
    operation = func._schema.name.removeprefix("c10d::")
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    lists = [[x for x in tree_flatten(a)[0] if isinstance(x, Tensor)] for a in args[:2]]
    tensors = [x for found in lists for x in found]
    agreed = tensors if operation not in _AGREED else lists[_AGREED[operation]]
    forms: list[tuple[Any, ...]] = [
        (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in agreed
    ]
    group, peer, splits = _group(args), -1, ()
    if operation in ("send", "recv_"):
        kind, peer = _MESSAGES[operation], given.get("dst", given.get("src", -1))
        read, written = (tensors, []) if operation == "send" else ([], tensors)
    else:
        kind, (written, read) = "collective", lists
        if operation in _ROOTED and group is not None:
            root = given["root_rank"]
            forms.append((_ROOTED[operation], root))
            if operation in _IN_PLACE:
                sends = (group.rank() == root) is _IN_PLACE[operation]
                read, written = (written, []) if sends else ([], written)
        if operation == "alltoall_base_":
            size = group.size() if group is not None else 1
            splits = tuple(
                tuple(given[name]) or (x.shape[0] // size,) * size
                for name, x in (("input_split_sizes", read[0]), ("output_split_sizes", written[0]))
            )
            forms = [(*(tuple(x.shape[1:]) for x in tensors[:1]), forms[0][1])]
    if recorder.reduction:
        forms.append((recorder.reduction,))
    on_host = all(x.device.type == "cpu" for x in tensors)
    recorder.communicate(
        kind, operation.strip("_"), group, tuple(forms), read, written, peer, splits,
        bool(given.get("async_op", True)), on_host,
    )  # fmt: skip


def _group(args: tuple) -> dist.ProcessGroup | None:
    for x in args:
        if isinstance(x, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(x)
    return None


def _is_sizes(x: Any) -> bool:
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(y, int) for y in x)


def _check_sizes(operation: str, args: tuple, group: dist.ProcessGroup | None) -> None:
    """Raise if tensors do not fit the group's size: NCCL would hang or fail."""
    size = group.size() if group is not None else 1
    found = [[x for x in tree_flatten(a)[0] if isinstance(x, FakeTensor)] for a in args[:2]]
    for large, small in _gathered_pairs(operation, found):
        if large.numel() != small.numel() * size:
            raise RuntimeError(
                f"{operation}: {tuple(small.shape)} on each of {size} ranks is not "
                f"{tuple(large.shape)}, {source_line()}"
            )
    if operation in _OF_PARTS and group is not None:
        parts, (whole, *_) = found if _OF_PARTS[operation] == 0 else found[::-1]
        mine = parts[group.rank()]
        if len(parts) != group.size() or mine.numel() != whole.numel():
            shapes = [tuple(x.shape) for x in parts]
            raise RuntimeError(
                f"{operation}: {tuple(whole.shape)} is not part {group.rank()} of {shapes} for "
                f"{group.size()} ranks, {source_line()}"
            )
    if operation != "alltoall_base_":
        return
    for tensor, splits in zip(args[:2], [x for x in args[2:] if _is_sizes(x)]):
        if sum(splits) != tensor.shape[0] or len(splits) != size:
            raise RuntimeError(
                f"all-to-all of {size} ranks: splits {list(splits)} of {tuple(tensor.shape)}, "
                f"{source_line()}"
            )


def _gathered_pairs(
    operation: str, found: list[list[FakeTensor]]
) -> Iterator[tuple[FakeTensor, FakeTensor]]:
    """Yield pairs of tensors: one with the parts of all ranks, one with a single part."""
    if operation in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        yield from zip(found[0], found[1])
    elif operation in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        yield from zip(found[1], found[0])


def _propagate(operation: str, args: tuple, size: int, reduction: str) -> None:
    """Set the known values of an operation's results, or forget them."""
    if operation in _UNCHANGED:
        return
    lists = [[x for x in tree_flatten(a)[0] if isinstance(x, FakeTensor)] for a in args]
    if operation == "allreduce_":
        for x in lists[0]:
            _reduce(x, size, reduction)
    elif operation in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        for out, source in zip(lists[0], lists[1]):
            value = known(source)
            _set(out, None if value is None else _repeated(value, out))
    elif operation == "allgather_":
        value = known(lists[1][0])
        for out in lists[0]:
            _set(out, value if value is not None and value.shape == out.shape else None)
    elif operation == "alltoall_base_":
        out, value = lists[0][0], known(lists[1][0])
        _set(out, value if value is not None and value.shape == out.shape else None)
    else:
        forget(lists[0])  # the results come first


def _reduce(x: FakeTensor, size: int, reduction: str) -> None:
    value = known(x)
    if value is None or value.dtype == torch.bool:  # equal on all ranks, and so is their sum
        return
    if reduction == "SUM":
        value.mul_(size)
    elif reduction not in ("MAX", "MIN", "AVG"):
        forget([x])


def _repeated(value: Tensor, out: Tensor) -> Tensor:
    return value.reshape(-1).repeat(out.numel() // max(value.numel(), 1)).view(out.shape)


def _set(out: FakeTensor, value: Tensor | None) -> None:
    """Set the values of a tensor that a collective has filled; None: forget them."""
    if value is None:
        forget([out])
        return
    before = known(out)
    if before is not None:
        before.copy_(value)
    elif out.numel() * out.element_size() == out.untyped_storage().nbytes():
        attach_values(out, value.clone())
