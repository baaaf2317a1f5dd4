"""Disk space of a run's checkpoints, and host memory of the copy that is being written."""

from __future__ import annotations

import shutil
from math import ceil
from pathlib import Path

from mppo.planning.memory import BYTES
from mppo.planning.run_plan import RolePlan
from mppo.recipe.schema import Recipe

MOMENTS = 8
"""Bytes per parameter of Adam's two moments."""
COPY = 4
"""Bytes per parameter of a float32 copy or a moving average."""


def checkpoint_bytes(recipe: Recipe, plans: list[RolePlan]) -> int:
    """Bytes of one checkpoint.

    For every trained role: weights, moments, and master weights in float32 if the weights are
    bfloat16. For the exported role also the moving average and the Hugging Face folder.
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
    """
    if not recipe.trainer.async_save:
        return 0
    without_folder = recipe.trainer.model_copy(update={"checkpoint_hf": False})
    total = checkpoint_bytes(recipe.model_copy(update={"trainer": without_folder}), plans)
    world = plans[0].layout.world
    return ceil(total * min(recipe.trainer.n_gpus_per_node or world, world) / world)


def host_copy_warning(copy: int, memory: int, source: str) -> str | None:
    """A warning if a node has too little memory for the copy; else None."""
    if copy <= memory:
        return None
    return (
        f"trainer.async_save: the copy of a checkpoint takes {_size(copy)} on each node, "
        f"which has {_size(memory)} ({source}): set trainer.async_save=false"
    )


def describe_checkpoints(recipe: Recipe, plans: list[RolePlan], steps: int | None) -> str:
    """One line: when checkpoints are saved, and the size of one, of those kept, and of the host's
    copy. ``steps`` None: they depend on the data."""
    text, copy = _describe_disk(recipe, plans, steps), host_copy_bytes(recipe, plans)
    return f"{text}; each node's memory holds a copy of {_size(copy)}" if copy else text


def disk_warning(recipe: Recipe, plans: list[RolePlan], steps: int | None, free: int) -> str | None:
    """A warning if the checkpoints that a run keeps take more than the ``free`` bytes of the
    disk."""
    one = checkpoint_bytes(recipe, plans)
    count = (_most_at_once(recipe, steps) or 1) if _saves_regularly(recipe) else 1
    if count * one <= free:
        return None
    number = "a checkpoint takes" if count == 1 else f"{count} checkpoints take"
    return (
        f"trainer.default_local_dir: {number} {_size(count * one)}, and its disk has "
        f"{_size(free)} free: free space, set trainer.max_ckpt_to_keep, or choose another disk"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    folder = folder.resolve()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _saves_regularly(recipe: Recipe) -> bool:
    return recipe.trainer.save_freq > 0 or recipe.trainer.save_every_minutes is not None


def _most_at_once(recipe: Recipe, steps: int | None) -> int | None:
    """Most checkpoints that are on the disk together; None if their number has no known limit."""
    trainer = recipe.trainer
    if trainer.max_ckpt_to_keep is not None:
        # a new checkpoint is complete before the oldest is deleted
        return trainer.max_ckpt_to_keep + bool(trainer.best_metric) + 1
    if steps is not None and trainer.save_freq > 0 and trainer.save_every_minutes is None:
        return ceil(steps / trainer.save_freq)  # the last step is always saved
    return None


def _describe_disk(recipe: Recipe, plans: list[RolePlan], steps: int | None) -> str:
    trainer, one = recipe.trainer, checkpoint_bytes(recipe, plans)
    freq, minutes, keep = trainer.save_freq, trainer.save_every_minutes, trainer.max_ckpt_to_keep
    when = [f"every {freq} steps"] if freq > 0 else []
    when += [f"every {minutes:g} minutes"] if minutes is not None else []
    text = f"{' and '.join(when) or 'only when the run is stopped'}, {_size(one)} each"
    if not _saves_regularly(recipe):
        return text
    count = _most_at_once(recipe, steps)
    if count is None:
        limit = "trainer.max_ckpt_to_keep limits them"
        return f"{text}; all are kept: {_size(100 * one)} per 100 ({limit})"
    if keep is not None:
        best = " and the best" if trainer.best_metric else ""
        return f"{text}; the newest {keep}{best} are kept: up to {_size(count * one)}"
    return f"{text}; all {count} are kept: {_size(count * one)}"


def _size(count: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e6:.1f} MB"
