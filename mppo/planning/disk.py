"""Disk space of a run's checkpoints."""

from __future__ import annotations

from math import ceil

from mppo.config.schema import Recipe
from mppo.planning.memory import BYTES
from mppo.planning.plan import RolePlan

MOMENTS = 8
"""Bytes per parameter of Adam's two moments."""
COPY = 4
"""Bytes per parameter of a float32 copy or a moving average."""


def checkpoint_bytes(recipe: Recipe, plans: list[RolePlan]) -> int:
    """Bytes of one checkpoint.

    For every trained role: weights, moments, and master weights in float32 if the weights are
    bfloat16. For the actor also the moving average and the Hugging Face folder.

    Args:
        recipe: the recipe.
        plans: its roles (``plan_roles``).
    """
    size = BYTES[recipe.model.dtype]
    total = 0
    for plan in plans:
        if not plan.mini_batches:
            continue
        per_parameter = size + MOMENTS + (COPY if size < COPY else 0)
        if plan.role.name == "actor":
            per_parameter += COPY if recipe.actor.ema_decay is not None else 0
            per_parameter += size if recipe.trainer.checkpoint_hf else 0
        total += plan.parameters * per_parameter
    return total


def describe_checkpoints(recipe: Recipe, plans: list[RolePlan], steps: int | None) -> str:
    """One line: when checkpoints are saved, the size of one, and of all that are kept.

    Args:
        recipe: the recipe.
        plans: its roles.
        steps: PPO steps of the run; None if they depend on the data.
    """
    trainer, one = recipe.trainer, checkpoint_bytes(recipe, plans)
    freq, minutes, keep = trainer.save_freq, trainer.save_every_minutes, trainer.max_ckpt_to_keep
    when = [f"every {freq} steps"] if freq > 0 else []
    when += [f"every {minutes:g} minutes"] if minutes is not None else []
    text = f"{' and '.join(when) or 'only when the run is stopped'}, {_size(one)} each"
    if not when:
        return text
    if keep is not None:
        best = " and the best" if trainer.best_metric else ""
        count = keep + bool(trainer.best_metric)
        # a new checkpoint is complete before the oldest is deleted
        return f"{text}; the newest {keep}{best} are kept: up to {_size((count + 1) * one)}"
    if steps is not None and freq > 0 and minutes is None:
        count = ceil(steps / freq)  # the last step is always saved
        return f"{text}; all {count} are kept: {_size(count * one)}"
    return (
        f"{text}; all are kept: {_size(100 * one)} per 100 (trainer.max_ckpt_to_keep limits them)"
    )


def _size(count: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e6:.1f} MB"
