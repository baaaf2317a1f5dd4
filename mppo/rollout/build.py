"""Choosing the rollout engine by name."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mppo.config.schema import Recipe
from mppo.models.configuration import DTYPES
from mppo.parallel import device
from mppo.rollout.engine import RolloutEngine


def build_engine(recipe: Recipe, folder: Path, hf_config, run_dir: Path) -> RolloutEngine:
    """Start the engine ``rollout.name`` asks for; collective.

    Args:
        recipe: the recipe.
        folder: Hugging Face folder of the actor.
        hf_config: its config.
        run_dir: where an engine may keep logs.

    Returns:
        The engine, waiting for its first weights.
    """
    from mppo.rollout.local import LocalEngine

    rollout = recipe.rollout
    return LocalEngine(
        folder,
        hf_config,
        DTYPES[rollout.dtype or recipe.model.dtype],
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=device.device(),
        batch_size=rollout.batch_size,
    )
