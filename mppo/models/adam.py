"""AdamW with the state layout of Megatron's distributed checkpoints.

Transformer Engine's and Apex's FusedAdam keep the step in the parameter group and exactly two
tensors per parameter; Megatron saves and loads this layout. torch's AdamW keeps the step as a third
tensor, which Megatron can save but not load. If neither library is installed, ``install`` makes
Megatron build the optimizer of this module, whose update runs the kernel of
``torch.optim.AdamW(fused=True)``.

With ``optim.cpu_offload_fraction`` Megatron's ``HybridDeviceOptimizer`` has an optimizer on the GPU
and some on the CPU. The CPU's optimizers hold copies of their main weights, get the gradients
before a step, and send the weights back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mppo.safety.input_error import InputError


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019); one kernel call per parameter group.

    ``p <- p (1 - lr wd)``; ``m <- b1 m + (1 - b1) g``; ``v <- b2 v + (1 - b2) g^2``;
    ``p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``

    Megatron selects decoupled weight decay by ``adam_w_mode``; False raises InputError.
    Source: https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise InputError("adam_w_mode = False is not supported: only decoupled weight decay is")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Apply the gradients; parameters without a gradient keep their value."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                grads = [p.grad for p in params]
                _update(params, grads, [self._moments(p) for p in params], group)

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _update(
    params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict
) -> None:
    step = torch.full((), float(group["step"]), device=params[0].device)
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim calls it
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [step] * len(params),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


@functools.cache
def install() -> None:
    """Make Megatron build this AdamW, unless Transformer Engine or Apex is installed."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    megatron_optimizer.Adam = AdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = AdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


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
