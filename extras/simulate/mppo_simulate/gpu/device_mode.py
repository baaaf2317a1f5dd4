"""Tensors on the simulated GPU: shape, dtype, device and storage, but no data.

Inside ``SimulatedGpu`` every operation on "cuda" runs on torch's fake tensors, which check shapes,
dtypes and devices as the real operations do. Tensors on the CPU stay real. The ledger records every
storage; the counters count every kernel and every wait of the host.

Fake tensors have no values. If the host reads one:

- a value that depends on host data only is computed (``mppo_simulate.gpu.known_values``);
- any other floating-point number reads as 1.0 (0.0 in copies to the host), and is counted;
- any other integer or truth value is an error, because control flow or a shape would depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mppo_simulate.gpu.collectives import record_communication, run_collective
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.known_values import (
    CPU,
    MOST_BYTES,
    UnknownValue,
    attach_values,
    evaluate_known,
    known,
    untouched_zeros,
    written,
)
from mppo_simulate.gpu.ledger import Ledger, source_line
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.gpu.result_cache import ResultCache

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_VALUE_SHAPED = {
    aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result's shape depends on values, so that the host waits for the GPU."""
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
            aten._index_put_impl_.default}  # fmt: skip
_FILLING = {
    aten.index_put_.default: aten.masked_fill_.Tensor,
    aten.index_put.default: aten.masked_fill.Tensor,
}
"""What torch executes for ``x[mask] = number``."""
_FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_NO_KERNEL = (
    "prim::", "aten::empty", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::new_empty",
    "aten::set_", "aten::_local_scalar_dense", "aten::resize_", "aten::_unsafe_view",
)  # fmt: skip


class _FakeTensors(FakeTensorMode):
    avoid_device_init = True  # pyright: ignore[reportAssignmentType]  there is no GPU to initialise


class SimulatedGpu(TorchDispatchMode):
    """Dispatch mode that executes operations on the simulated GPU.

    Args:
        ledger: records every allocation.
        counters: count every kernel, wait and collective.
        recorder: knows the current stream, and records who uses which storage.
    """

    def __init__(self, ledger: Ledger, counters: Counters, recorder: RankRecorder) -> None:
        super().__init__()
        self.ledger, self.counters, self.recorder = ledger, counters, recorder
        counters.on_wait = recorder.host_waits
        self._fakes = _FakeTensors(allow_non_fake_inputs=True)
        self._fakes.cache_enabled = False  # ResultCache is faster
        self._results = ResultCache(self._fakes)
        self._special = {
            aten._local_scalar_dense.default: self._read_item,
            aten.equal.default: self._compare,
            aten.is_pinned.default: lambda *args, **kwargs: False,
            aten._pin_memory.default: lambda x, *args, **kwargs: x,
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy,
            aten.set_.source_Storage_storage_offset: self._set_storage,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        fakes = fake_arguments(args, kwargs)
        where = kwargs.get("device")
        if not fakes and (where is None or torch.device(where).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func.namespace == "c10d":
            return run_collective(self.counters, self.recorder, func, args, kwargs)
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in _INDEXED:
            if func in _FILLING and fills_mask(args):
                x, (mask, *_), value = args[:3]
                mask = mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))
                return self._run(_FILLING[func], (x, mask, value), {}, [x, mask])
            for x in (*args[1], *args[2:3]):
                if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
                    self.recorder.launch()  # torch moves it to the GPU
                    self._reads_host(x, waits=True)
            args = (args[0], self._positions(args[1]), *args[2:])
            fakes = fake_arguments(args, kwargs)
        return self._run(func, args, kwargs, fakes)

    def _on_host(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Execute an operation on CPU tensors, without pinning, which needs a GPU driver."""
        if func is aten.is_pinned.default:
            return False
        if func is aten._pin_memory.default:
            return args[0]
        if func.namespace == "c10d":
            record_communication(self.recorder, func, args, kwargs)
        if kwargs.get("pin_memory"):
            out = func(*args, **{**kwargs, "pin_memory": False})
            self.recorder.pin(out)
            return out
        if not func.is_view:
            changed = list(written(func, args, kwargs)) if func._schema.is_mutable else []
            kept = {id(x) for x in changed}
            given = (x for x in nested_tensors((*args, *kwargs.values())) if id(x) not in kept)
            self.recorder.host_touches(given, changed)
        if func is torch.ops.c10d.alltoall_base_.default:
            # what other ranks send is not simulated, and the fake process group refuses such sizes
            args[0].zero_()
            nothing = args[0].new_empty(0)
            args = (nothing, nothing, args[2], [], [], *args[5:])
        return func(*args, **kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict, fakes: list[FakeTensor]) -> Any:
        name = func._schema.name
        if func.is_view or name.startswith(_NO_KERNEL):
            return self._result(func, args, kwargs, fakes)
        self.counters.operation()
        self.recorder.launch()
        out = self._result(func, args, kwargs, fakes)
        if self.recorder.on:
            changed = list(written(func, args, kwargs)) if func._schema.is_mutable else []
            kept = {id(x) for x in changed}
            made = (x for x in tree_flatten(out)[0] if id(x) not in kept)
            self.recorder.touch((x for x in fakes if id(x) not in kept), (*changed, *made))
        return out

    def _result(self, func: Any, args: tuple, kwargs: dict, fakes: list[FakeTensor]) -> Any:
        """Make an operation's results, in the ledger and with their values if known."""
        if fakes and func._schema.name.rpartition("::")[2] in _FILLED:
            return self._filled(func, args, kwargs)
        value = evaluate_known(func, args, kwargs, fakes)
        if func in _VALUE_SHAPED:
            out = self._of_unknown_shape(func, args, value)
        else:
            out = self._results.run(func, args, kwargs)
        self._note(out, value)
        return out

    def _note(self, out: Any, value: Any) -> None:
        """Record an operation's results in the ledger, and attach their values if known."""
        results = (out,) if isinstance(out, Tensor) else tree_flatten(out)[0]
        values = tree_flatten(value)[0] if value is not None else [None] * len(results)
        for result, found in zip(results, values):
            if isinstance(result, FakeTensor) and result.device.type == "cuda":
                storage = result.untyped_storage()
                is_new = getattr(storage, "allocation", None) is None
                self.ledger.note(result)
                if is_new and isinstance(found, Tensor):
                    attach_values(result, found)

    def _filled(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        """Execute ``zeros_like`` or a similar operation: only the shape of its input matters."""
        out = self._results.run(func, args, kwargs)
        name = func._schema.name
        number = 0 if "zeros" in name else 1
        if "full" in name:
            number = args[2] if name.endswith("new_full") else args[1]
        if out.device.type == "cpu":
            return torch.full(out.shape, number, dtype=out.dtype)
        value, nbytes = None, out.numel() * out.element_size()
        if nbytes <= MOST_BYTES:  # floats too: masks are built from zeros
            value = untouched_zeros(nbytes).view(out.dtype).view(out.shape)
            value = value.fill_(number) if number else value
        self._note(out, value)
        return out

    def _of_unknown_shape(self, func: Any, args: tuple, value: Any) -> Any:
        """Make a result whose shape depends on values, and count the host's wait for it."""
        self.counters.wait(func._schema.name.removeprefix("aten::"))
        if func is aten.masked_select.default:
            mask = known(args[1]) if isinstance(args[1], FakeTensor) else args[1]
            if mask is not None:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                count = int(mask.expand(shape).sum())
                with self._fakes:
                    return torch.empty(count, dtype=args[0].dtype, device=args[0].device)
        if value is None:
            raise UnknownValue(
                f"{func._schema.name} of values that only a GPU has, {source_line()}"
            )

        def fake(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        with self._fakes:
            return tree_map(fake, value)

    def _positions(self, indices: list[Any]) -> list[Any]:
        """Replace every mask among the indices by the positions that it selects."""
        found: list[Any] = []
        for index in indices:
            if not isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            self._host_reads(index, "mask")
            mask = known(index)
            if mask is None:
                shape = tuple(index.shape)
                raise UnknownValue(f"a mask {shape} that only a GPU has, {source_line()}")
            found += [self._to_gpu(x) for x in mask.nonzero(as_tuple=True)]
        return found

    def _to_gpu(self, x: Tensor) -> Tensor:
        out = self._results.empty(x.shape, x.stride(), x.dtype, torch.device("cuda", 0))
        self._note(out, x)
        return out

    def _host_reads(self, x: Any, why: str) -> None:
        """Note that the host waits until a kernel has read a tensor, or several."""
        self.recorder.launch()
        self.recorder.touch(nested_tensors([x]), [])
        self.counters.wait(why)

    def _read_item(self, x: FakeTensor) -> Any:
        self._host_reads(x, "item")
        value = known(x)
        if value is not None:
            return value.item()
        if not x.dtype.is_floating_point:
            raise UnknownValue(f"the host reads a {x.dtype} that only a GPU has, {source_line()}")
        self.counters.unknown[source_line()] += 1
        return 1.0

    def _compare(self, x: Tensor, other: Tensor) -> bool:
        self._host_reads([x, other], "equal")
        found = [known(t) if isinstance(t, FakeTensor) else t for t in (x, other)]
        if found[0] is None or found[1] is None:
            raise UnknownValue(f"the host compares tensors that only a GPU has, {source_line()}")
        return torch.equal(found[0], found[1])

    def _to_copy(self, x: Tensor, **kwargs: Any) -> Any:
        where = kwargs.get("device")
        waits = not kwargs.get("non_blocking")
        if where is None or torch.device(where).type != "cpu" or not isinstance(x, FakeTensor):
            args = (x,)
            out = self._run(aten._to_copy.default, args, kwargs, fake_arguments(args, {}))
            self._reads_host(x, waits)
            return out
        out = self._to_host(x, kwargs.get("dtype") or x.dtype, waits)
        if not waits:  # torch then copies to pinned memory
            self.recorder.pin(out)
            self.recorder.touch([], [out])
        return out

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.is_meta or source.is_meta:  # host memory of parts that have left the GPU
            self.counters.operation()
            self.recorder.launch()
            self.recorder.touch([source], [to])
            if not non_blocking:
                self.recorder.host_waits()
            return to
        if isinstance(to, FakeTensor):
            args = (to, source, non_blocking)
            out = self._run(aten.copy_.default, args, {}, fake_arguments(args, {}))
            self._reads_host(source, not non_blocking)
            return out
        assert isinstance(source, FakeTensor)
        value = self._to_host(
            source, to.dtype, waits=not non_blocking or not self.recorder.is_pinned(to)
        )
        self.recorder.touch([], [to])
        return to.copy_(value)

    def _reads_host(self, source: Tensor, waits: bool) -> None:
        """Note that the copy that was started last reads a tensor in host memory.

        The host waits for it, unless the memory is pinned and the caller does not ask for that.
        """
        if isinstance(source, FakeTensor):
            return
        pinned = self.recorder.is_pinned(source)
        if pinned:
            self.recorder.touch([source], [])
        if waits or not pinned:
            self.counters.wait("copy from host")

    def _to_host(self, x: FakeTensor, dtype: torch.dtype, waits: bool = True) -> Tensor:
        self.recorder.launch()
        self.recorder.touch([x], [])
        if waits:
            self.counters.wait("copy to host")
        value = known(x)
        if value is not None:
            return value.to(dtype, copy=True)
        if not x.dtype.is_floating_point and waits:
            raise UnknownValue(
                f"the host reads {x.dtype} {tuple(x.shape)} that only a GPU has, {source_line()}"
            )
        self.counters.unknown[source_line()] += 1
        return torch.zeros((), dtype=dtype, device=CPU).expand(x.shape).contiguous()

    def _set_storage(
        self, x: FakeTensor, source: Any, offset: int, size: Any, stride: Any = ()
    ) -> FakeTensor:
        """Make ``x`` a view of a storage; torch's own ``set_`` would never free that storage."""
        meta = torch.empty(0, dtype=x.dtype, device="meta")
        view = meta.set_(source, offset, size, stride or torch.empty(size, device="meta").stride())
        x.data = FakeTensor(self._fakes, view, x.device)
        return x


def fills_mask(args: tuple) -> bool:
    """Whether torch fills a mask, ``x[mask] = number``, for which the host does not wait."""
    _, (first, *others), value, *accumulates = args
    scalar = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.numel() == 1
    mask = isinstance(first, FakeTensor) and first.dtype in (torch.bool, torch.uint8)
    return scalar and mask and not any(accumulates) and all(other is None for other in others)


def fake_arguments(args: Any, kwargs: Any) -> list[FakeTensor]:
    """List the simulated tensors among an operation's arguments, also those in lists."""
    given = (*args, *kwargs.values()) if kwargs else args
    return [x for x in nested_tensors(given) if isinstance(x, FakeTensor)]


def nested_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some values, also those in lists."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (y for y in tree_flatten(x)[0] if isinstance(y, Tensor))
