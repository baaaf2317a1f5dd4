"""Megatron's DDP and (distributed) optimizer for a role's chunks, with learning-rate schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mppo.config.sections.megatron import MegatronConfig
from mppo.config.sections.optimizer import OptimConfig
from mppo.models import adam
from mppo.models.stage import Stage

logging.getLogger("megatron.core").setLevel(logging.WARNING)


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did.

    Args:
        loss: of the whole mini-batch.
        grad_norm: norm of the whole gradient before clipping.
        applied: False where loss or gradient was not finite; the weights are then untouched.

    All are the same on every rank.
    """

    loss: float
    grad_norm: float
    applied: bool


def wrap_in_ddp(stages: Sequence[Stage], megatron: MegatronConfig) -> list[DistributedDataParallel]:
    """Wrap chunks in Megatron's DDP; gradients are kept and reduced in float32, and summed."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        bucket_size=40_000_000 if megatron.overlap_grad_reduce else None,
    )
    chunks = [
        DistributedDataParallel(stage.config, ddp_config, stage, disable_bucketing=i > 0)
        for i, stage in enumerate(stages)
    ]
    if megatron.overlap_grad_reduce:
        config = stages[0].config
        no_sync = [chunk.no_sync for chunk in chunks]
        start = [chunk.start_grad_sync for chunk in chunks]
        single = len(chunks) == 1
        config.no_sync_func = no_sync[0] if single else no_sync
        config.grad_sync_func = start[0] if single else start
    return chunks


class RoleOptimizer:
    """Adam over a role's chunks with clipping, a schedule, and a guard against non-finite steps.

    Args:
        chunks: DDP-wrapped chunks of this rank.
        optim: the recipe's section.
        megatron: whether the state is sharded over data parallelism.
        dtype: parameters' dtype; bfloat16 keeps float32 main weights.
        total_steps: PPO steps of the run, the length of the decay.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        megatron: MegatronConfig,
        dtype: torch.dtype,
        total_steps: int,
    ) -> None:
        adam.install()
        self._chunks = list(chunks)
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=min(optim.min_lr, optim.lr),
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
        )
        self.megatron = get_megatron_optimizer(config, self._chunks)
        warmup = optim.lr_warmup_steps
        if warmup is None:
            warmup = int(optim.lr_warmup_steps_ratio * total_steps)
        self.schedule = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=optim.lr,
            min_lr=min(optim.min_lr, optim.lr),
            lr_warmup_steps=warmup,
            lr_decay_steps=max(total_steps, warmup + 1),
            lr_decay_style=optim.lr_decay_style,
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=max(total_steps, 1),
            wd_incr_style="constant",
        )

    def advance(self) -> float:
        """Begin a PPO step; returns its learning rate, the schedule's after the steps before it."""
        self.schedule.step(0)
        self.schedule.num_steps += 1
        return self.learning_rate

    def resume_schedule(self, steps: int) -> None:
        """Put the schedule where ``steps`` PPO steps leave it."""
        self.schedule.num_steps = steps

    @property
    def learning_rate(self) -> float:
        """The current learning rate (of the first parameter group on this rank, if it has any)."""
        groups = self.megatron.param_groups
        return float(groups[0]["lr"]) if groups else 0.0

    def zero_grad(self) -> None:
        """Clear accumulated gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def gradient_norm(self) -> float:
        """Make the accumulated gradient ready; returns its norm, inf where it overflowed."""
        overflow = self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm() or 0.0)
        return math.inf if overflow and math.isfinite(norm) else norm

    def apply(self, norm: float) -> None:
        """Clip the gradient, whose norm is ``norm``, and take the step."""
        for optimizer in self._parts():
            parameters = optimizer.get_parameters()
            if optimizer.config.clip_grad > 0 and parameters:
                clip_grads.clip_grad_by_total_norm_fp32(
                    parameters, optimizer.config.clip_grad, norm
                )
        self.megatron.step_with_ready_grads()

    def _parts(self):
        return getattr(self.megatron, "chained_optimizers", [self.megatron])
