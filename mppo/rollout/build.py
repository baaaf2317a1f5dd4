"""Build the rollout engine that the recipe names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mppo.models.configuration import DTYPES
from mppo.parallel import device
from mppo.recipe.schema import Recipe
from mppo.rollout.engine import RolloutEngine, sampling_seed
from mppo.weights.bucket import WeightBucket


class NoEngine:
    """Stands for an engine where responses come from a dump (``trainer.replay``)."""

    def submit(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("a replay (trainer.replay) has no engine to generate with")

    generate = turns = submit

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Take no weights: no rank iterates the stream."""

    def sync_metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        """Nothing to release."""

    def stop(self) -> None:
        """Nothing to stop."""


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
        from mppo.rollout.sglang.server_options import check_installed
        from mppo.rollout.sglang.server_response import routing_shape
        from mppo.rollout.sglang.sglang_engine import SGLangEngine

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
    from mppo.rollout.local.local_engine import LocalEngine

    return LocalEngine(
        folder,
        hf_config,
        dtype,
        rank=rank,
        world=world,
        device=device.device(),
        batch_size=rollout.batch_size,
    )
