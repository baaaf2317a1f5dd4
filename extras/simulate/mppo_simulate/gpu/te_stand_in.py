"""A stand-in for the compiled part of Transformer Engine, under its original Python part.

The wheel ``transformer-engine`` contains the Python part. This module replaces
``transformer_engine_torch``, which needs CUDA's compiler. The functions that a bfloat16 model calls
check their arguments and return tensors of the right shape, dtype and device, without computing
values. All other functions raise an error.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

VERSION = "2.11.0"
"""The version of Transformer Engine whose compiled functions are replaced."""
COMPILED = "transformer_engine_torch"
_TRITON = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
    ("triton.runtime.autotuner", "Heuristics"),
)
_workspaces: list[Tensor] = []


class _Member:
    """A member of an enumeration, or a compiled function without a stand-in."""

    _count = 0

    def __init__(self, name: str) -> None:
        _Member._count += 1
        self.name, self.value = name, _Member._count

    def __int__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"{COMPILED}.{self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self!r} is compiled code without a stand-in in the simulation")


class _Enumeration(type):
    """A class that creates a member for every attribute that is read."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Member(f"{cls.__name__}.{name}")
        setattr(cls, name, member)
        return member

    def __iter__(cls) -> Any:
        return iter(())


class _CompiledPart(types.ModuleType):
    """The module: capitalised names are enumerations, other names functions that raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _Enumeration(name, (), {}) if name[0].isupper() else _Member(name)
        setattr(self, name, value)
        return value


def install(folder: Path) -> None:
    """Make ``transformer_engine`` importable from a folder. Call it before importing Megatron.

    Args:
        folder: target folder of ``pip install --no-deps --target`` for transformer-engine and for
            onnxscript, onnx, onnx_ir and ml_dtypes, which it imports.

    Raises:
        ValueError: the folder does not contain version ``VERSION`` of transformer-engine, or Python
            finds another one first.
    """
    found = sorted(folder.glob("transformer_engine-*.dist-info"))
    if [path.name for path in found] != [f"transformer_engine-{VERSION}.dist-info"]:
        raise ValueError(
            f"{folder}: holds {', '.join(p.name for p in found) or 'no transformer-engine'}; "
            f"pip install --no-deps --target {folder} transformer-engine=={VERSION} onnxscript "
            "onnx onnx_ir ml_dtypes"
        )
    installed = importlib.util.find_spec("transformer_engine")
    if installed is not None and folder.resolve() not in Path(installed.origin or "").parents:
        raise ValueError(
            f"{folder}: Python imports Transformer Engine from {installed.origin} instead; give "
            "the folder of that one"
        )
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then the package loads no shared library
    sys.path.append(str(folder))
    part = _CompiledPart(COMPILED)
    part.__spec__ = importlib.machinery.ModuleSpec(COMPILED, None)
    sys.modules[COMPILED] = part
    for name, function in _kernels(part).items():
        setattr(part, name, function)
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    plain_version = importlib.metadata.version

    def version(name: str) -> str:
        ours = name.replace("_", "-") in ("transformer-engine", "transformer-engine-torch")
        return VERSION if ours else plain_version(name)

    importlib.metadata.version = version


def accept_simulated_tensors(started: Callable[[], None]) -> None:
    """Make Transformer Engine's Python code run on simulated tensors.

    Its selection of an attention kernel requires ``torch.Tensor``, which is not their class. Its
    Triton kernels, which permute a mixture's tokens, are not started: they only fill tensors that
    Python code has allocated. Call this after ``cuda_namespace.install``.

    Args:
        started: called for every Triton kernel.
    """
    importlib.import_module("transformer_engine.pytorch")
    for module, name in _TRITON:
        kernels: Any = getattr(importlib.import_module(module), name)
        kernels.run = lambda self, *args, **kwargs: started()
    _keep_workspaces()
    choice: Any = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.utils"
    )
    plain = choice.get_attention_backend

    def get_attention_backend(parameters: Any) -> Any:
        parameters.qkv_type = torch.Tensor
        return plain(parameters)

    choice.get_attention_backend = get_attention_backend


def permanent_buffers() -> list[Tensor]:
    """The tensors that Transformer Engine keeps: workspaces of cuBLAS, and gradients that nothing
    reads, one for every shape of weights whose gradients it adds to Megatron's buffers itself."""
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    return [*_workspaces, *base._dummy_wgrads.values()]


def _keep_workspaces() -> None:
    gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    plain = gemm.get_cublas_workspace

    def get_cublas_workspace(*args: Any) -> Any:
        found = plain(*args)
        _workspaces[:] = {id(x): x for x in (*_workspaces, *tree_flatten(found)[0])}.values()
        return found

    gemm.get_cublas_workspace = get_cublas_workspace


def _kernels(part: Any) -> dict[str, Any]:
    """Stand-ins for the compiled functions that a bfloat16 model calls."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def l2norm(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], each: bool = False):
        one = torch.ones(1, dtype=torch.float32, device="cuda")
        return one, torch.ones(len(lists[0]), device="cuda") if each else None

    optimizers = ("adam", "adam_param_remainder", "adam_capturable", "adam_fp8", "scale")
    return {
        "get_cudnn_version": lambda: 91600,
        "get_cublasLt_version": lambda: 130200,
        "get_stream_priority_range": lambda *args: (0, -1),
        "get_num_cublas_streams": lambda: 4,
        "device_supports_multicast": lambda *args: True,
        "ubuf_built_with_mpi": lambda: False,
        "get_fused_attn_backend": lambda *args, **kwargs: (
            part.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        ),
        "generic_gemm": _gemm,
        "te_general_grouped_gemm": _grouped_gemm,
        "layernorm_fwd": _layernorm_forward,
        "layernorm_bwd": _layernorm_backward,
        "rmsnorm_fwd": _rmsnorm_forward,
        "rmsnorm_bwd": _rmsnorm_backward,
        "fused_rope_forward": _rotary,
        "fused_rope_backward": _rotary,
        "fused_attn_fwd": _attention_forward,
        "fused_attn_bwd": _attention_backward,
        "thd_read_half_tensor": lambda x, bounds, half: x.new_empty(len(x) // 2, *x.shape[1:]),
        "thd_read_second_half_lse": _second_half_lse,
        "thd_second_half_lse_correction": nothing,
        "thd_out_correction": nothing,
        "thd_grad_correction": nothing,
        "multi_tensor_l2norm": l2norm,
        **{f"multi_tensor_{name}": nothing for name in optimizers},
    }


def _dtype(member: Any, default: torch.dtype) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType  # type: ignore[import-not-found]

    return next((dtype for dtype, known in TE_DType.items() if known is member), default)


def _factors(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> tuple[Tensor, Tensor]:
    """Return the two matrices of a product in cuBLAS's column order, after checking them."""
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    left, right = left.t() if transpose_b else left, right.t() if transpose_a else right
    if not (a.is_cuda and b.is_cuda) or left.shape[1] != right.shape[0]:
        raise RuntimeError(
            f"product of {tuple(left.shape)} on {b.device} and {tuple(right.shape)} on {a.device}"
        )
    return left, right


def _check_size(out: Tensor, rows: int, columns: int) -> None:
    if out.numel() != rows * columns:
        raise RuntimeError(f"a product of {rows} x {columns} into {tuple(out.shape)}")


def _gemm(a: Tensor, ta: bool, b: Tensor, tb: bool, out: Tensor | None, quantizer: Any,
          out_dtype: Any, bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Any,
          grad: bool, workspace: Tensor, size: int, accumulate: bool, *rest: Any,
          **options: Any) -> tuple:  # fmt: skip
    left, right = _factors(a, ta, b, tb)
    rows, columns = left.shape[0], right.shape[1]
    if out is None:
        shape = (rows, columns) if tb else (*b.shape[:-1], columns)
        out = torch.empty(shape, dtype=_dtype(out_dtype, b.dtype), device=b.device)
    else:
        _check_size(out, rows, columns)
        out.add_(0) if accumulate else out.zero_()
    bias_gradient = torch.empty_like(bias) if grad and bias is not None else None
    return out, bias_gradient, None, options.get("extra_output")


def _grouped_gemm(a: list[Tensor], ta: bool, b: list[Tensor], tb: bool, out: list[Tensor],
                  out_dtype: Any, splits: Any, bias: Any, bias_type: Any, single: bool,
                  *rest: Any) -> Any:  # fmt: skip
    rows = columns = 0
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        left, right = _factors(one, ta, other, tb)
        rows, columns = rows + left.shape[0], right.shape[1]
        if not single:
            _check_size(out[number], left.shape[0], columns)
            out[number].zero_()
    if single:
        _check_size(out[0], rows, columns)
        out[0].zero_()
    return bias


def _rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any,
                     out_dtype: Any, *rest: Any) -> tuple:  # fmt: skip
    if x.device != weight.device or x.shape[-1:] != weight.shape:
        raise RuntimeError(f"norm of {tuple(x.shape)} on {x.device} by {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(x.shape, dtype=_dtype(out_dtype, x.dtype), device=x.device)
    rows = x.numel() // x.shape[-1]
    return out, None, torch.empty(rows, dtype=torch.float32, device=x.device)


def _rmsnorm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> tuple:
    return torch.empty_like(x), torch.empty_like(weight)


def _layernorm_forward(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple:
    if bias.shape != weight.shape or bias.device != weight.device:
        raise RuntimeError(f"norm with a bias of {tuple(bias.shape)} on {bias.device}")
    out, _, deviations = _rmsnorm_forward(x, weight, *rest)
    return out, torch.empty_like(deviations), deviations


def _layernorm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *rest: Any
) -> tuple:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _rotary(x: Tensor, angles: Tensor, starts: Any, layout: Any, interleaved: bool,
            bounds: Tensor | None, *rest: Any) -> Tensor:  # fmt: skip
    if x.device != angles.device or angles.shape[-1] > x.shape[-1]:
        raise RuntimeError(f"rotary embedding of {tuple(x.shape)} by {tuple(angles.shape)}")
    if bounds is not None and (bounds.dtype is not torch.int32 or not bounds.is_cuda):
        raise RuntimeError("rotary embedding of packed tokens needs int32 bounds on the GPU")
    return torch.empty_like(x)


def _attention_forward(*args: Any) -> list[Tensor]:
    bounds, (q, k, v) = args[11], args[13:16]
    if not q.dtype == k.dtype == v.dtype or bounds.dtype is not torch.int32 or not bounds.is_cuda:
        raise RuntimeError("attention needs one dtype and int32 bounds on the GPU")
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[1], 1, dtype=torch.float32, device=q.device)
    return [out, lse, torch.empty(2, dtype=torch.int64, device=q.device)]


def _attention_backward(*args: Any) -> list[Tensor | None]:
    return [*(torch.empty_like(x) for x in args[13:16]), None]


def _second_half_lse(lse: Tensor, bounds: Tensor, packed: bool, length: int) -> Tensor:
    shape = (lse.shape[0], length) if packed else (*lse.shape[:-1], length)
    return torch.empty(shape, dtype=lse.dtype, device=lse.device)
