"""Divide a migrated run's weights over its GPUs, where its system shards them in another way.

FSDP and DeepSpeed shard weights over all ranks; here tensor and pipeline parallelism divide them.
The planner of the dry run says which sizes fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mppo.recipe.checks import check_recipe
from mppo.recipe.document import inline_yaml
from mppo.recipe.gpu_types import DEFAULT_GPU, find_gpu
from mppo.recipe.load import read_recipe
from mppo.recipe.rules.rule import world_size_of
from mppo.recipe.schema import Recipe
from mppo_migrate.migration import Migration
from mppo_migrate.row import Setting

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_ROLES = ("actor", "critic", "reward_model")
CONFIGS = Path("configs")
"""Folder with the configs of models that are not on this machine, by the model's name."""


def choose_layout(result: Migration, gpu: str | None = None) -> None:
    """Add sizes of tensor and pipeline parallelism with which the run fits, or say why not.

    A command that gives sizes itself, or has one GPU, stays as it is.

    Args:
        result: a complete migration; changed.
        gpu: name of the GPU, or its memory in GiB; None: the default of the dry run.

    Raises:
        ConfigError: there is no such GPU.
    """
    name = find_gpu(gpu or DEFAULT_GPU).name
    recipe, world = _read(result, ()), 1
    if recipe is not None:
        world = world_size_of(recipe)
    given = any(key.endswith(_SIZES) and not key.startswith("rollout") for key in result.settings)
    if recipe is None or world == 1 or given:
        return
    configs = _configs(recipe)
    if configs is None:
        result.checks.append(
            "actor.megatron, critic.megatron: tensor and pipeline parallelism divide the weights "
            "over ranks, not FSDP or DeepSpeed. The models' config.json are not on this machine, "
            "nor in ./configs/NAME: no layout is chosen; --dry-run shows whether the run fits"
        )
        return
    for sizes in _candidates(world, recipe.trainer.n_gpus_per_node or world):
        settings = list(_settings(result, sizes, f"chosen: the smallest layout that fits {name}"))
        planned = _read(result, settings)
        if planned is not None and _fits(planned, world, configs, gpu):
            for setting in settings:
                result.add(setting)
            if not settings:
                result.without.append(
                    f"sharding of weights: a rank holds all of them, which fit {name}"
                )
            return
    result.checks.append(
        f"actor.megatron, critic.megatron: no tensor and pipeline parallelism of {world} ranks "
        f"fits {name}; --dry-run shows what is missing"
    )


def _read(result: Migration, more: Sequence[Setting]) -> Recipe | None:
    """The recipe of the migration with further settings; None if it has issues."""
    settings = [*result.settings.values(), *more]
    recipe, issues = read_recipe(None, [f"{s.key}={inline_yaml(s.value)}" for s in settings])
    return None if issues else recipe


def _configs(recipe: Recipe) -> dict[str, Any] | None:
    """The config of each role's model, by role, read without a network; None if one is missing."""
    folders = {}
    for role in recipe.roles():
        here = Path(role.path).expanduser()
        folder = here if here.exists() else CONFIGS / here.name
        if not (folder / "config.json").is_file():
            return None
        folders[role.name] = folder
    from mppo.hub.builtin import read_model_config  # imports transformers

    return {name: read_model_config(folder) for name, folder in folders.items()}


def _candidates(world: int, per_node: int) -> list[tuple[int, int]]:
    """Sizes of tensor parallelism, within a node, and pipeline parallelism: few ranks first."""
    powers = [1 << i for i in range(world.bit_length())]
    pairs = [(tp, pp) for tp in powers for pp in powers if world % (tp * pp) == 0]
    return sorted(
        ((tp, pp) for tp, pp in pairs if per_node % tp == 0), key=lambda p: (p[0] * p[1], p[1])
    )


def _settings(result: Migration, sizes: tuple[int, int], origin: str) -> Iterator[Setting]:
    for role in _ROLES:
        if role == "reward_model" and "reward_model.path" not in result.settings:
            continue
        for key, size in zip(_SIZES, sizes):
            if size > 1:
                yield Setting(f"{role}.megatron.{key}", size, origin)


def _fits(recipe: Recipe, world: int, configs: dict[str, Any], gpu: str | None) -> bool:
    if check_recipe(recipe, world, configs):
        return False
    from mppo.planning.describe import plan_run  # imports torch

    return plan_run(recipe, world, configs, gpu).fits
