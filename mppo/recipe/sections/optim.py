"""The recipe's ``optim`` sections: Adam and its learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mppo.recipe.sections.section import Section


class OptimConfig(Section):
    """AdamW with warm-up and decay of the learning rate.

    The schedule counts PPO steps that are complete, as in Megatron-LM and transformers: the first
    step is not decayed, and with a warm-up its rate is 0.
    """

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate after warm-up."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_steps: int | None = Field(default=None, ge=0)
    """PPO steps over which the rate rises linearly from 0 to ``lr``. null:
    ``lr_warmup_steps_ratio`` of the run's steps."""
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the run's steps that warm up, used where ``lr_warmup_steps`` is null."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the decay from ``lr`` to ``min_lr`` over the run's steps; ``constant`` does not
    decay."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; 0 turns it off."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's constant in the denominator."""
    cpu_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of Adam's moments that stays in host memory, where the CPU updates it (Megatron-Core's
    hybrid optimizer); needs ``use_distributed_optimizer``. No effect in a run on the CPU."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; 0 turns clipping off."""
