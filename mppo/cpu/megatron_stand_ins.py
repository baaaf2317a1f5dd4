"""Megatron-Core on a machine without CUDA.

Megatron passes ``device="cuda"`` and calls ``torch.cuda`` in its schedules, DDP, optimizer and MoE
dispatcher. ``install`` replaces the global ``torch`` of Megatron's modules by a stand-in whose
factories allocate on the CPU and whose ``cuda`` does nothing. torch itself is not changed, except
for ``Tensor.type``, ``Tensor.cuda``, ``Tensor.record_stream`` and ``Module.cuda``. On CUDA nothing
is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "randint", "randn", "tensor", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
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
    """A CUDA stream or event whose work is always complete."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait(self, *args, **kwargs) -> None: ...

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, event=None) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _Overlay(types.ModuleType):
    """A module with its own attributes, and another module's where it has none."""

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
        kwargs.pop("pin_memory", None)  # there is no device to copy to
        return factory(*args, **kwargs)

    return wrapped


def _cpu_for_cuda(device) -> torch.device:
    if isinstance(device, int):
        return _CPU
    device = torch.device(device)
    return _CPU if device.type == "cuda" else device


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
    """``all_to_all_single`` with split sizes as lists, which gloo needs, or as tensors."""

    def as_list(sizes):
        return sizes.tolist() if isinstance(sizes, Tensor) else sizes

    return torch.distributed.all_to_all_single(
        output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs
    )


def _all_gather(outputs, input, group=None, **kwargs):
    """``all_gather`` of unequal sizes, which gloo lacks and the expert-tensor gather needs."""
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
    """``reduce_scatter`` with parts of unequal sizes."""
    if all(len(part) == len(output) for part in inputs):
        return torch.distributed.reduce_scatter(output, inputs, group=group, **kwargs)
    total = torch.cat(list(inputs))
    torch.distributed.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in inputs])[torch.distributed.get_rank(group)])
    return None


def _reduce_scatter_tensor(reduce_scatter):
    """gloo's own sums all parts on every rank first, which takes twice as long; this one sends each
    rank only its own, equal part."""

    @functools.wraps(reduce_scatter)
    def exchanged(output, input, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        if async_op or op != torch.distributed.ReduceOp.SUM:
            return reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        parts = torch.empty_like(input)
        torch.distributed.all_to_all_single(parts, input, group=group)
        torch.sum(parts.view(-1, *output.shape), 0, out=output)
        return None

    return exchanged


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
        all_to_all_single=_all_to_all_single,
        all_gather=_all_gather,
        reduce_scatter=_reduce_scatter,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Overlay(torch, cuda=cuda, distributed=distributed, **factories)


def _patch_tensor_methods() -> None:
    """Make ``.cuda()`` return self, and ``.type()`` of parameters name a CUDA type."""
    plain_type = Tensor.type

    def parameter_type(self, dtype=None, *args, **kwargs):
        spelled = plain_type(self, *(() if dtype is None else (dtype,)), *args, **kwargs)
        if dtype is None and isinstance(self, torch.nn.Parameter):
            return spelled.replace("torch.", "torch.cuda.", 1)
        return spelled

    Tensor.type = parameter_type
    Tensor.cuda = lambda self, *args, **kwargs: self
    Tensor.record_stream = lambda self, s: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _names_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(f"megatron.core.{module}"))


def _patch_modules() -> None:
    """Replace functions that need CUDA, or NCCL's collectives, in the modules that use them."""
    for module in ("distributed.param_and_grad_buffer", "tensor_parallel.mappings"):
        names = _names_of(module)
        reduce_scatter = "dist_reduce_scatter_func"
        names[reduce_scatter] = _reduce_scatter_tensor(names[reduce_scatter])
    _names_of("tensor_parallel.random").update(
        _get_cuda_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    for module in ("optimizer.clip_grads", "optimizer.optimizer"):
        _names_of(module)["clip_grad_by_total_norm_fp32"] = _clip_grad_by_total_norm


def _clip_grad_by_total_norm(
    parameters, max_norm, total_norm, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients down to ``max_norm``; Megatron's function accepts only CUDA gradients."""
    name = "decoupled_grad" if use_decoupled_grad else "grad"
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [g.detach() for p in parameters if (g := getattr(p, name, None)) is not None]
    coefficient = max_norm / (float(total_norm) + 1.0e-6)
    if grads and coefficient < 1.0:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]  # as torch.nn.utils does
            grads, coefficient
        )


@contextlib.contextmanager
def _light_imports() -> Iterator[None]:
    """Inside the context ``torch.compile`` returns the function unchanged, and wandb is not found.

    Megatron compiles its small fusions when it is imported, and loading Inductor for them takes a
    fifth of a rank's start-up; none of them is used on the CPU. For its inference it imports wandb
    where that is installed, a tenth of the start-up; our tracker imports it when a run uses it.
    """
    compiled, torch.compile = torch.compile, lambda function, *args, **kwargs: function
    wandb = sys.modules.get("wandb")
    sys.modules["wandb"] = None  # type: ignore[assignment]  # an import fails
    try:
        yield
    finally:
        torch.compile = compiled
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


@functools.cache
def install() -> None:
    """Replace ``torch`` in every Megatron-Core module by the stand-in. Idempotent."""
    with _light_imports():
        for name in _MODULES:
            importlib.import_module(name)
    stand_in = _torch_stand_in()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = stand_in
    _patch_tensor_methods()
    _patch_modules()
