"""Megatron-Core's hybrid Adam: a share of the moments in host memory, which the CPU updates.

``HybridDeviceOptimizer`` has an optimizer on the GPU and some on the CPU. The CPU's optimizers hold
copies of their main weights, get the gradients before a step, and send the weights back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def prepare_moments(part: MegatronOptimizer) -> None:
    if not isinstance(part.optimizer, HybridDeviceOptimizer):
        part.init_state_fn(part.optimizer, part.config)
        return
    hybrid = part.optimizer
    for inner in hybrid.sub_optimizers:
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state[parameter]
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if inner is not hybrid.gpu_optimizer:
                state["step"] = torch.zeros(())  # torch's AdamW, not Transformer Engine's
    hybrid._sync_sub_optimizers_state_to_hdo()


def steps_taken(parts: Iterable[MegatronOptimizer]) -> int:
    """Number of optimizer steps so far; 0 on a rank without parameters."""
    return max((int(holder.get("step", 0)) for holder in _holders(parts)), default=0)


def resume_steps(parts: Iterable[MegatronOptimizer], steps: int) -> None:
    """Set the number of steps, after weights and moments have been loaded in place."""
    parts = list(parts)
    for holder in _holders(parts):
        before = holder.get("step")
        holder["step"] = torch.full_like(before, steps) if torch.is_tensor(before) else steps
    for hybrid in (p.optimizer for p in parts if isinstance(p.optimizer, HybridDeviceOptimizer)):
        for main, copy in hybrid.gpu_params_map_cpu_copy.items():
            copy.data.copy_(main.data)


def _holders(parts: Iterable[MegatronOptimizer]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if not isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.param_groups
            continue
        for inner in part.optimizer.sub_optimizers:
            on_gpu = inner is part.optimizer.gpu_optimizer
            yield from inner.param_groups if on_gpu else inner.state.values()
