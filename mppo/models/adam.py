"""AdamW with the state Megatron's distributed checkpoints know.

Transformer Engine's and Apex's FusedAdam keep the step in the parameter group and exactly two
tensors per parameter; Megatron saves and loads that shape. torch's AdamW keeps the step beside the
tensors, which Megatron can save but not load. Where neither library is installed, ``install`` makes
Megatron build this one: the update of ``torch.optim.AdamW(fused=True)``, by the same kernel.
"""

from __future__ import annotations

import functools

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019), all tensors of a group in one kernel.

    ``p <- p (1 - lr wd)``; ``m <- b1 m + (1 - b1) g``; ``v <- b2 v + (1 - b2) g^2``;
    ``p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: ``wd``.
        adam_w_mode: True; Megatron names the variant by this argument.

    Source: https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is offered here")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Apply the gradients; parameters without one are left alone."""
        assert closure is None, "closures are not offered"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            chosen = [p for p in group["params"] if p.grad is not None]
            if chosen:
                _update(chosen, [self._moments(p) for p in chosen], group)

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _update(params: list[Tensor], states: list[dict[str, Tensor]], group: dict) -> None:
    step = torch.full((), float(group["step"]), device=params[0].device)
    torch._fused_adamw_(
        params,
        [p.grad for p in params],
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
