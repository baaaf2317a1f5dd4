"""A simulated ``torch.cuda``, and replacements for functions of torch that reject "cuda".

These functions raise an error before they dispatch an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from mppo.recipe.gpu_types import GpuType
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.known_values import UnknownValue, known
from mppo_simulate.gpu.ledger import Ledger, source_line
from mppo_simulate.gpu.pinned_array import pinned_array
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.gpu.streams import stream_functions

_TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float16: "HalfTensor",
    torch.float64: "DoubleTensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


class _Generator:
    """A random number generator of a GPU; only the form of its state is simulated."""

    device = torch.device("cuda", 0)

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def get_state(self) -> Tensor:
        return self._state.clone()

    def set_state(self, state: Tensor) -> _Generator:
        _check_state(state)
        return self

    def clone_state(self) -> _Generator:
        return _Generator(self._state.clone())

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: Any) -> None: ...

    def manual_seed(self, seed: int) -> _Generator:
        return self

    def initial_seed(self) -> int:
        return 0


def _check_state(state: Tensor, *args: Any) -> None:
    if state.device.type != "cpu" or state.dtype is not torch.uint8:
        raise TypeError(f"a GPU's random state is uint8 on the CPU, not {state.dtype}")


def install(
    ledger: Ledger,
    counters: Counters,
    recorder: RankRecorder,
    gpu: GpuType,
    device: int,
    devices: int,
) -> None:
    """Replace the functions that need a GPU.

    This cannot be undone; call it in a process that only simulates.

    Args:
        ledger: ledger of the rank.
        counters: counters of the rank.
        recorder: recorder of the rank, which has the streams.
        gpu: type of the GPU that ``torch.cuda`` reports.
        device: index of this rank's GPU.
        devices: number of GPUs of the node.
    """
    functions = _cuda_functions(ledger, gpu, device, devices)
    for name, value in (functions | stream_functions(recorder, counters)).items():
        setattr(torch.cuda, name, value)
    state = torch.zeros(16, dtype=torch.uint8)
    torch.cuda.default_generators = tuple(_Generator(state) for _ in range(devices))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nccl.version = lambda: (2, 28, 9)  # pyright: ignore[reportAttributeAccessIssue]  loaded lazily
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.accelerator.synchronize = torch.cuda.synchronize
    replaced: Any = fake_tensor
    replaced.init_gpu_context = lambda device: None  # before torch 2.13 it makes a tensor there
    # Megatron's compiled fusions: the plain functions allocate the same tensors, or more
    torch.compile = lambda model=None, *args, **kwargs: (lambda f: f) if model is None else model
    _replace_tensor_methods(ledger, counters, recorder)
    torch.nn.Module._apply = _move_module  # pyright: ignore[reportAttributeAccessIssue]  replaced
    torch.tensor = _on_any_device(torch.tensor)
    torch.as_tensor = _on_any_device(torch.as_tensor)


def _cuda_functions(ledger: Ledger, gpu: GpuType, device: int, devices: int) -> dict[str, Any]:
    current = {"device": device}
    state = torch.zeros(16, dtype=torch.uint8)

    class Properties:
        name, total_memory = gpu.name, gpu.nbytes
        major, minor = gpu.capability
        multi_processor_count = 132
        uuid = "GPU-simulated"

    def set_device(where: Any) -> None:
        index = where if isinstance(where, int) else torch.device(where).index
        current["device"] = index or 0

    def peak(*args: Any) -> int:
        return max((peak.size for peak in ledger.peaks.values()), default=0)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **kwargs: function(),
        "device_count": lambda: devices,
        "current_device": lambda: current["device"],
        "set_device": set_device,
        "get_device_name": lambda *args: gpu.name,
        "get_device_properties": lambda *args: Properties,
        "get_device_capability": lambda *args: gpu.capability,
        "get_arch_list": lambda: ["sm_{}{}".format(*gpu.capability)],
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "get_rng_state": lambda *args, **kwargs: state.clone(),
        "set_rng_state": _check_state,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "seed": lambda: None,
        "memory_allocated": lambda *args: ledger.now,
        "memory_reserved": lambda *args: ledger.now,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda *args: None,
        "mem_get_info": lambda *args: (gpu.nbytes - ledger.now, gpu.nbytes),
    }


def _replace_tensor_methods(ledger: Ledger, counters: Counters, recorder: RankRecorder) -> None:
    plain_tolist, plain_type, plain_numpy = Tensor.tolist, Tensor.type, Tensor.numpy
    plain_address, storage_address = Tensor.data_ptr, torch.UntypedStorage.data_ptr
    plain_resize = torch.UntypedStorage.resize_

    def tolist(self: Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            recorder.host_touches([self], [])
            return plain_tolist(self)
        recorder.launch()
        recorder.touch([self], [])
        counters.wait("tolist")
        value = known(self)
        if value is not None:
            return plain_tolist(value)
        if not self.dtype.is_floating_point:
            raise UnknownValue(
                f"the host reads {self.dtype} values that only a GPU has, {source_line()}"
            )
        counters.unknown[source_line()] += 1
        return plain_tolist(torch.ones(self.shape))

    def numpy(self: Tensor, **options: Any) -> Any:
        array = plain_numpy(self, **options)
        if not recorder.on or not recorder.is_pinned(self):
            return array
        return pinned_array(array, self, recorder.host_touches)

    def type_name(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.device.type == "cuda":
            return f"torch.cuda.{_TYPE_NAMES[self.dtype]}"
        return plain_type(self, dtype, *args, **kwargs) if dtype else plain_type(self)

    def data_ptr(self: Tensor) -> int:
        if not isinstance(self, FakeTensor):
            return plain_address(self)
        return ledger.note(self).address + int(self.storage_offset()) * self.element_size()

    def storage_data_ptr(self: Any) -> int:
        allocation = getattr(self, "allocation", None)
        return storage_address(self) if allocation is None else allocation.address

    replaced: Any = Tensor
    replaced.tolist, replaced.type, replaced.data_ptr = tolist, type_name, data_ptr
    replaced.numpy = numpy
    FakeTensor.tolist = tolist  # pyright: ignore[reportAttributeAccessIssue]  torch's reads each number
    replaced.cuda = lambda self, *args, **kwargs: self.to("cuda")
    replaced.pin_memory = lambda self, *args: self
    replaced.is_pinned = lambda self, *args: False
    replaced.record_stream = lambda self, stream: recorder.record_stream(self, stream.actor)

    def resize(self: Any, nbytes: int) -> Any:
        plain_resize(self, nbytes)
        if hasattr(self, "allocation"):
            ledger.note_storage(self)
        return self

    storage: Any = torch.UntypedStorage
    storage.data_ptr, storage.resize_ = storage_data_ptr, resize


def _move_module(self: Any, move: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Replacement for ``torch.nn.Module._apply``, which makes a new parameter if ``move`` copies.

    torch keeps the parameter object and swaps its tensor, which simulated tensors do not support.
    """
    for child in self.children():
        _move_module(child, move)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = move(parameter)
        if moved is not parameter:
            replaced = torch.nn.Parameter(moved, parameter.requires_grad)
            vars(replaced).update(vars(parameter))
            self._parameters[name] = replaced
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = move(buffer)
    return self


_PLAIN = frozenset((int, float, bool))


def _on_any_device(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``torch.tensor`` or ``torch.as_tensor`` to create the tensor on the CPU and move it."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        where = kwargs.get("device")
        if isinstance(data, list | tuple):
            data = _numbers(data)
        if where is None or torch.device(where).type != "cuda":
            return factory(data, *args, **kwargs)
        del kwargs["device"]
        return factory(data, *args, **kwargs).to(where)

    return make


def _numbers(data: Any) -> Any:
    """Replace simulated tensors in nested lists by their values."""
    if isinstance(data, list | tuple):
        if _PLAIN.issuperset(map(type, data)):
            return data
        return [_numbers(x) for x in data]
    return data.item() if isinstance(data, FakeTensor) else data
