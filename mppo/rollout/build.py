"""Build the rollout engine that the recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.config.schema import Recipe
from mppo.models.configuration import DTYPES
from mppo.parallel import device
from mppo.rollout.engine import RolloutEngine, sampling_seed
from mppo.rollout.no_engine import NoEngine


def build_engine(
    recipe: Recipe, folder: Path, hf_config: Any, run_dir: Path, step: int = 0
) -> RolloutEngine:
    """Build and start the engine ``rollout.name``, without weights; for ``trainer.replay`` one that
    cannot generate. Collective."""
    rollout = recipe.rollout
    if recipe.trainer.replay is not None:
        return NoEngine()
    dtype = DTYPES[rollout.dtype or recipe.model.dtype]
    rank, world = dist.get_rank(), dist.get_world_size()
    if rollout.name == "sglang":
        from mppo.rollout.sglang.engine import SGLangEngine
        from mppo.rollout.sglang.routed_experts import routing_shape
        from mppo.rollout.sglang.server_options import check_installed

        if not rollout.urls:
            check_installed(on_cpu=not device.is_cuda())
        replays = recipe.actor.router_replay == "R3"

        return SGLangEngine(
            folder,
            hf_config,
            dtype,
            rollout,
            rank=rank,
            world=world,
            device=device.device(),
            run_dir=run_dir,
            seed=sampling_seed(recipe.trainer.seed, step),
            routing=routing_shape(hf_config) if replays else None,
        )
    from mppo.rollout.local.engine import LocalEngine

    return LocalEngine(
        folder,
        hf_config,
        dtype,
        rank=rank,
        world=world,
        device=device.device(),
        batch_size=rollout.batch_size,
    )
