"""Disk space of a run's checkpoints, and host memory of the copy that is being written."""

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
    bfloat16. For the exported role also the moving average and the Hugging Face folder.

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
        if plan.role.name == recipe.exported_role:
            per_parameter += COPY if plan.role.ema_decay is not None else 0
            per_parameter += size if recipe.trainer.checkpoint_hf else 0
        total += plan.parameters * per_parameter
    return total


def host_copy_bytes(recipe: Recipe, plans: list[RolePlan]) -> int:
    """Bytes of the copy of a checkpoint in the memory of each node, which every save uses again.

    Each rank copies the shards that it writes; Megatron divides all shards evenly over the ranks.
    0 if training waits for saves.

    Args:
        recipe: the recipe.
        plans: its roles.
    """
    if not recipe.trainer.async_save:
        return 0
    without_folder = recipe.trainer.model_copy(update={"checkpoint_hf": False})
    total = checkpoint_bytes(recipe.model_copy(update={"trainer": without_folder}), plans)
    world = plans[0].layout.world
    return ceil(total * min(recipe.trainer.n_gpus_per_node or world, world) / world)


def host_copy_warning(copy: int, memory: int, source: str) -> str | None:
    """A warning if a node has too little memory for the copy; else None.

    Args:
        copy: of ``host_copy_bytes``.
        memory: bytes that the run may use there.
        source: where that number comes from.
    """
    if copy <= memory:
        return None
    return (
        f"trainer.async_save: the copy of a checkpoint takes {_size(copy)} on each node, "
        f"which has {_size(memory)} ({source}): set trainer.async_save=false"
    )


def describe_checkpoints(recipe: Recipe, plans: list[RolePlan], steps: int | None) -> str:
    """One line: when checkpoints are saved; the size of one, of those kept, and of the host's copy.

    Args:
        recipe: the recipe.
        plans: its roles.
        steps: PPO steps of the run; None if they depend on the data.
    """
    text, copy = _describe_disk(recipe, plans, steps), host_copy_bytes(recipe, plans)
    return f"{text}; each node's memory holds a copy of {_size(copy)}" if copy else text


def _describe_disk(recipe: Recipe, plans: list[RolePlan], steps: int | None) -> str:
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
