"""SGLang plugin: plain torch for code that otherwise needs a GPU or AMX.

SGLang calls ``register`` in each of its processes (entry point ``sglang.srt.plugins``). With a GPU,
or a CPU whose AMX kernels SGLang has, it changes nothing.
"""

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MODELS = "sglang_cpu_compat.models"
"""SGLang imports these first, and its two hundred other models only for other families."""


def _gated_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """final += sigmoid(hidden @ gate) * shared, in place (the shared expert of Qwen2-MoE)."""
    gate = torch.nn.functional.linear(hidden_states, gate_weight.reshape(1, -1)).sigmoid()
    final_hidden_states.add_(gate * shared_output)


def _own_experts_only(
    original: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, config: Any
) -> Tensor:
    """Ignore experts of other ranks (index -1), as the GPU kernels do.

    The plain loop over experts takes numbers as indices. It is given a row for each choice of an
    expert that is here.
    """
    row, choice = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
    if len(row) == topk_output.topk_ids.numel():
        return original(layer, x, topk_output, config)
    total = torch.zeros_like(x)
    if len(row):
        here = topk_output._replace(
            topk_ids=topk_output.topk_ids[row, choice, None],
            topk_weights=topk_output.topk_weights[row, choice, None],
        )
        total.index_add_(0, row, original(layer, x[row], here, config))
    return total


def _rope_on_default_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Drop the device argument, which unscaled rotary embeddings refuse; the CPU is the default."""
    if kwargs.get("device") == "cpu" and kwargs.get("rope_scaling") is None:
        kwargs["device"] = None
    return original(*args, **kwargs)


def _fork_from_here_on(*args: Any, **kwargs: Any) -> None:
    """Fork SGLang's processes from its first one, which has made all imports.

    SGLang spawns them for the sake of CUDA; each then imports everything anew, which takes most of
    a start. A process that runs threads already cannot be forked safely and goes on spawning.
    """
    if threading.active_count() == 1:
        os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODELS)
        importlib.import_module("sglang.srt.models.registry")
        multiprocessing.set_start_method("fork", force=True)


def _unpinned(*args: Any, **kwargs: Any) -> None:
    """Host memory that is not pinned, because there is no CUDA runtime."""


def register() -> None:
    """Install the replacements."""
    from sglang.srt.utils.common import cpu_has_amx_support, is_cpu

    if not is_cpu() or cpu_has_amx_support():
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        _gated_add,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        _rope_on_default_device,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        _own_experts_only,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", _unpinned, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork_from_here_on, HookType.AFTER
    )
    # the torch_native backend attends over the cache alone, which holds latents: prefill must use
    # the absorbed form too, or log-probabilities are silently wrong
    AttentionBackendRegistry.register(
        "torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA
    )
