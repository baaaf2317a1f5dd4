"""Megatron's DDP and (distributed) optimizer of a role's chunks, and its learning-rate schedule."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mppo.models import adam
from mppo.models.adam import prepare_moments
from mppo.models.stage import Stage
from mppo.parallel import device
from mppo.parallel.moved_storages import MovedStorages
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.optim import OptimConfig

logging.getLogger("megatron.core").setLevel(logging.WARNING)


@dataclass(frozen=True)
class StepResult:
    """Loss and norm of the gradient (before clipping) of a mini-batch, over all ranks; ``applied``
    is False if either was not finite, and the weights are then unchanged."""

    loss: float
    grad_norm: float
    applied: bool


def overlaps(megatron: MegatronConfig, replicas: int, on_cuda: bool) -> tuple[bool, bool]:
    """Whether gradients are reduced over ``replicas``, and weights gathered, in the background; not
    on a CPU, where communication would take the computation's cores."""
    default = on_cuda and replicas > 1 and megatron.use_distributed_optimizer
    reduce, gather = megatron.overlap_grad_reduce, megatron.overlap_param_gather
    return default if reduce is None else reduce, default if gather is None else gather


def wrap_in_ddp(
    stages: Sequence[Stage], megatron: MegatronConfig, replicas: int
) -> list[DistributedDataParallel]:
    """Wrap chunks in Megatron's DDP, which accumulates and sums gradients in float32."""
    overlap_reduce, overlap_gather = overlaps(megatron, replicas, device.is_cuda())
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=overlap_gather,
    )
    chunks = [
        DistributedDataParallel(stage.config, ddp_config, stage, disable_bucketing=i > 0)
        for i, stage in enumerate(stages)
    ]
    if overlap_gather:
        # Megatron's hooks wait for a module's weights when the module is called, but heads and
        # experts use weights without calling their modules: RoleOptimizer waits for all of them
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
    if overlap_reduce:
        config = stages[0].config
        no_sync = [chunk.no_sync for chunk in chunks]
        start = [chunk.start_grad_sync for chunk in chunks]
        single = len(chunks) == 1
        # interleaved schedules take lists, unlike the fields' annotations
        config.no_sync_func = cast("Callable", no_sync[0] if single else no_sync)
        config.grad_sync_func = cast("Callable", start[0] if single else start)
    return chunks


@dataclass(frozen=True)
class PendingNorm:
    """A gradient's norm on its way: ``squares`` by sets of ranks that share parameters."""

    squares: list[torch.Tensor]
    works: list[dist.Work]
    overflow: bool

    def wait(self) -> float:
        """The norm, inf where the gradient overflowed."""
        for work in self.works:
            work.wait()
        norms = [square**0.5 for square in torch.cat(self.squares).tolist()]  # one copy to the host
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))
        return math.inf if self.overflow and math.isfinite(norm) else norm


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Float32 ``[1]`` of this rank's share. Without Transformer Engine and Apex, Megatron's own
    function waits for the GPU once per tensor."""
    if not gradients:
        return torch.zeros(1, device=device.device())
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]  as optim
    return torch.stack(norms).norm().square().view(1)


def _clip(gradients: list[torch.Tensor], max_norm: float, norm: float) -> None:
    factor = max_norm / (norm + 1e-6)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


class GradientBuffers:
    """Megatron's gradient buffers of a role, whose memory is freed outside of updates."""

    def __init__(self, chunks: list[DistributedDataParallel], megatron: MegatronOptimizer) -> None:
        self._chunks, self._megatron = chunks, megatron

    def leave(self) -> None:
        """Free the buffers; the gradients are lost."""
        self._megatron.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Megatron uses typed storages
            for chunk in self._chunks:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)

    def arrive(self) -> None:
        """Allocate the buffers again, filled with zeros. Every view of them is valid again."""
        for chunk in self._chunks:
            chunk.restore_grad_buffers(synchronize=False)


class RoleOptimizer:
    """Adam over a role's chunks with clipping, a schedule, and a guard against non-finite steps.
    The moments exist from the start, as zeros; with bfloat16 the optimizer keeps float32 main
    weights. ``state`` has the storages of both."""

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
        self._gathering = False
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
            # on the CPU all moments are in host memory, and the CPU updates them
            optimizer_cpu_offload=device.is_cuda() and optim.cpu_offload_fraction > 0,
            optimizer_offload_fraction=optim.cpu_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=True,
        )
        self.megatron = get_megatron_optimizer(config, [*self._chunks])
        for part in self.parts:
            # by default with the first step; servers on the same device start before it, and divide
            # the memory that is free by then
            prepare_moments(part)
        self.gradients = GradientBuffers(self._chunks, self.megatron)
        self.state = MovedStorages(self._state_tensors, device.device())
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

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers with parameters on this rank: one; a second one for experts spread
        over ranks; or none."""
        return [part for part in self._chained() if part.optimizer is not None]

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        """Moments and main weights, without main weights that are views of the parameters."""
        weights = {p.untyped_storage()._cdata for chunk in self._chunks for p in chunk.parameters()}
        for part in self.parts:
            mains = (p for group in part.optimizer.param_groups for p in group["params"])
            moments = (x for state in part.optimizer.state.values() for x in state.values())
            for x in chain(mains, moments):
                if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in weights:
                    yield x

    def _chained(self) -> list[MegatronOptimizer]:
        return getattr(self.megatron, "chained_optimizers", [self.megatron])

    def advance(self) -> float:
        """Advance the schedule to the next PPO step; returns the learning rate of that step."""
        self.schedule.step(0)
        self.schedule.num_steps += 1
        return self.learning_rate

    def resume_schedule(self, steps: int) -> None:
        self.schedule.num_steps = steps

    @property
    def learning_rate(self) -> float:
        """The current learning rate; 0 on a rank without parameter groups."""
        groups = self.megatron.param_groups
        return float(groups[0]["lr"]) if groups else 0.0

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def start_norm(self) -> PendingNorm:
        """Finalise the accumulated gradient, and begin to sum its norm over the ranks. The sums are
        those of Megatron's ``get_grad_norm``, which waits for them."""
        overflow = self.megatron.prepare_grads()
        parts = self._chained()
        groups = [part.get_grad_stats_parallel_group() for part in parts]
        gradients = [part.get_main_grads_for_grad_norm() for part in parts]
        if all(group == groups[0] for group in groups):
            groups, gradients = groups[:1], [list(chain.from_iterable(gradients))]
        squares = [_sum_of_squares(part) for part in gradients]
        works = [
            cast("dist.Work", dist.all_reduce(square, group=group, async_op=True))
            for square, group in zip(squares, groups, strict=True)
        ]
        return PendingNorm(squares, works, overflow)

    def apply(self, norm: float) -> None:
        """Clip the gradient, whose norm is that of :meth:`start_norm`, and update the weights;
        ``wait_for_weights`` comes before their use."""
        self.state.wait()
        for optimizer in self.parts:
            if optimizer.config.clip_grad > 0:
                gradients = [p.grad for p in optimizer.get_parameters() if p.grad is not None]
                _clip(gradients, optimizer.config.clip_grad, norm)
        self.megatron.step_with_ready_grads()
        self._gathering = self._chunks[0].ddp_config.overlap_param_gather
        for chunk in self._chunks if self._gathering else ():
            chunk.start_param_sync()

    def wait_for_weights(self) -> None:
        """Wait for the weights that other ranks updated, if they arrive in the background."""
        for chunk in self._chunks if self._gathering else ():
            chunk.start_param_sync(force_sync=True)
        self._gathering = False
