"""A rank to simulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mppo.planning.residency import Residency
from mppo.recipe.gpu_types import GpuType
from mppo.recipe.schema import Recipe


@dataclass(frozen=True)
class RankCase:
    """A rank to simulate.

    Args:
        recipe: a valid recipe; its models' paths need not hold weights.
        hf_configs: Hugging Face config of each role's model, by role name.
        world_size: number of ranks.
        rank: the rank to simulate.
        steps: number of PPO steps to run.
        gpu: the type of the GPU.
        gpus_per_node: number of GPUs per node.
        transformer_engine: whether the stand-in of Transformer Engine (``te_stand_in``) is
            installed in this process.
        table: who is where in which phase; None: as planned for the GPU and these models.
        record: keep ``RankResult.record``.
        uneven: sequences have different lengths, and routers send some experts nothing.
    """

    recipe: Recipe
    hf_configs: Mapping[str, Any]
    world_size: int
    rank: int
    steps: int
    gpu: GpuType
    gpus_per_node: int = 8
    transformer_engine: bool = False
    table: Residency | None = None
    record: bool = False
    uneven: bool = False
