"""Megatron-Core on a machine without CUDA.

Megatron names ``device="cuda"`` and calls ``torch.cuda`` in its schedules, DDP, optimizer and MoE
dispatcher. Here those modules (and no others) get a stand-in for their global ``torch`` whose
factories land on the CPU and whose ``cuda`` is inert; torch itself stays as it is, save three
``Tensor`` methods that cannot work without CUDA anyway. Nothing of this is installed on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor

from mppo.cpu.shared_memory import SMALLEST, SharedMemory, shared_memory_of

_CPU = torch.device("cpu")
_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "triu_indices",
    "zeros",
    "zeros_like",
]
_MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.router_replay",
    "megatron.core.transformer.multi_latent_attention",
)


class _Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def record_event(self, event=None) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _Overlay(types.ModuleType):
    """A module that answers with its own attributes first, then with another module's."""

    def __init__(self, below: types.ModuleType, **own) -> None:
        super().__init__(below.__name__)
        self.__dict__.update(own)
        self.__dict__["_below"] = below

    def __getattr__(self, name: str):
        return getattr(self.__dict__["_below"], name)


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        return factory(*args, **kwargs)

    return wrapped


def _cpu_for_cuda(device) -> torch.device:
    if isinstance(device, int):
        return _CPU
    device = torch.device(device)
    return _CPU if device.type == "cuda" else device


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
    """gloo wants the split sizes as lists; Megatron's dispatcher holds them in tensors."""

    def as_list(sizes):
        return sizes.tolist() if isinstance(sizes, Tensor) else sizes

    return torch.distributed.all_to_all_single(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs
    )


def _all_gather(outputs, input, group=None, **kwargs):
    """gloo gathers equal sizes only; the expert-tensor gather has one size per rank."""
    rows = max(len(output) for output in outputs)
    if all(len(output) == rows for output in outputs):
        return torch.distributed.all_gather(outputs, input, group=group, **kwargs)
    padded = [input.new_zeros(rows, *input.shape[1:]) for _ in outputs]
    own = input.new_zeros(rows, *input.shape[1:])
    own[: len(input)] = input
    torch.distributed.all_gather(padded, own, group=group)
    for output, received in zip(outputs, padded):
        output.copy_(received[: len(output)])
    return None


def _reduce_scatter(output, inputs, group=None, **kwargs):
    """The reverse of ``_all_gather``: sums of unequal parts."""
    if all(len(part) == len(output) for part in inputs):
        return torch.distributed.reduce_scatter(output, inputs, group=group, **kwargs)
    total = torch.cat(list(inputs))
    torch.distributed.all_reduce(total, group=group)
    own = total.split([len(part) for part in inputs])[torch.distributed.get_rank(group)]
    output.copy_(own)
    return None


def _shared(group, async_op: bool, op, *tensors: Tensor) -> SharedMemory | None:
    """The memory through which a group's ranks exchange these tensors; None: gloo does it."""
    large = max(x.numel() * x.element_size() for x in tensors) >= SMALLEST
    plain = all(x.is_contiguous() and x.is_floating_point() for x in tensors)
    if async_op or op != torch.distributed.ReduceOp.SUM or not (large and plain):
        return None
    if torch.distributed.get_world_size(group) == 1:
        return None
    return shared_memory_of(group)


def _all_reduce(x, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
    """Sums of large tensors go through shared memory where the ranks have some."""
    memory = _shared(group, async_op, op, x)
    if memory is None:
        return torch.distributed.all_reduce(x, op=op, group=group, async_op=async_op)
    memory.all_reduce(x)
    return None


def _reduce_scatter_tensor(reduce_scatter):
    """Sums of equal parts, of which only those are exchanged that a rank keeps.

    gloo's own sums everything on every rank first, which takes twice as long.
    """

    @functools.wraps(reduce_scatter)
    def exchanged(output, input, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        if async_op or op != torch.distributed.ReduceOp.SUM:
            return reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        memory = _shared(group, async_op, op, output, input)
        if memory is not None:
            return memory.reduce_scatter(output, input)
        parts = torch.empty_like(input)
        torch.distributed.all_to_all_single(parts, input, group=group)
        torch.sum(parts.view(-1, *output.shape), 0, out=output)
        return None

    return exchanged


def _all_gather_tensor(all_gather):
    """Large tensors of equal size go through shared memory where the ranks have some."""

    @functools.wraps(all_gather)
    def gathered(output, input, group=None, async_op=False):
        memory = _shared(group, async_op, torch.distributed.ReduceOp.SUM, output, input)
        if memory is None:
            return all_gather(output, input, group=group, async_op=async_op)
        return memory.all_gather(output, input)

    return gathered


def _torch_stand_in() -> types.ModuleType:
    inert = _Stream()
    cuda = _Overlay(
        torch.cuda,
        Stream=_Stream,
        Event=_Stream,
        current_device=lambda: _CPU,
        current_stream=lambda *args: inert,
        default_stream=lambda *args: inert,
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_rng_state=lambda *args: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
        max_memory_allocated=lambda *args: 0,
        memory_allocated=lambda *args: 0,
        set_device=lambda device: None,
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda *args: None,
    )
    distributed = _Overlay(
        torch.distributed,
        all_reduce=_all_reduce,
        all_to_all_single=_all_to_all_single,
        all_gather=_all_gather,
        reduce_scatter=_reduce_scatter,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Overlay(torch, cuda=cuda, distributed=distributed, **factories)


def _patch_tensor_methods() -> None:
    """``.cuda()`` stays put; a parameter spells its type as Megatron's optimizer expects it."""
    plain_type = Tensor.type

    def parameter_type(self, dtype=None, *args, **kwargs):
        spelled = plain_type(self, *(() if dtype is None else (dtype,)), *args, **kwargs)
        if dtype is None and isinstance(self, torch.nn.Parameter):
            return spelled.replace("torch.", "torch.cuda.", 1)
        return spelled

    Tensor.type = parameter_type
    Tensor.cuda = lambda self, *args, **kwargs: self
    Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _shared_groups(create):
    """One gloo group per set of ranks, whatever axes of whatever layouts consist of them.

    Megatron makes about forty groups per layout, most of them equal, and each gloo group polls on
    a thread of its own. Made anew after the default group was destroyed.
    """
    world, groups = None, {}

    @functools.wraps(create)
    def shared(ranks=None, timeout=None, **kwargs):
        nonlocal world, groups
        if world is not torch.distributed.group.WORLD:
            world, groups = torch.distributed.group.WORLD, {}
        key = (tuple(ranks), timeout)
        if key not in groups:
            groups[key] = create(ranks, timeout, **kwargs)
        return groups[key]

    return shared


def _patch_modules() -> None:
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    parallel_state.create_group = _shared_groups(parallel_state.create_group)
    for name in ("distributed.param_and_grad_buffer", "tensor_parallel.mappings"):
        module = importlib.import_module(f"megatron.core.{name}")
        module.dist_reduce_scatter_func = _reduce_scatter_tensor(module.dist_reduce_scatter_func)
        module.dist_all_gather_func = _all_gather_tensor(module.dist_all_gather_func)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    clip_grads.clip_grad_by_total_norm_fp32 = _clip_grad_by_total_norm
    importlib.import_module(
        "megatron.core.optimizer.optimizer"
    ).clip_grad_by_total_norm_fp32 = _clip_grad_by_total_norm
    attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(attention, name, None), type):
            setattr(attention, name, type(name, (), {}))


def _clip_grad_by_total_norm(
    parameters, max_norm, total_norm, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients down to ``max_norm``; Megatron's own asserts on CUDA gradient types."""
    name = "decoupled_grad" if use_decoupled_grad else "grad"
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [g.detach() for p in parameters if (g := getattr(p, name, None)) is not None]
    coefficient = max_norm / (float(total_norm) + 1.0e-6)
    if grads and coefficient < 1.0:
        torch._foreach_mul_(grads, coefficient)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Functions defined meanwhile are not compiled.

    Megatron compiles its small fusions as it is imported, and to load Inductor for them is a fifth
    of a rank's start; none of them is on the CPU's path.
    """
    compiled, torch.compile = torch.compile, lambda function, *args, **kwargs: function
    try:
        yield
    finally:
        torch.compile = compiled


@functools.cache
def install() -> None:
    """Put the stand-in under every Megatron-Core module. Idempotent."""
    with _uncompiled():
        for name in _MODULES:
            importlib.import_module(name)
    stand_in = _torch_stand_in()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in
    _patch_tensor_methods()
    _patch_modules()
