"""The recipe of a run, a plan or an evaluation, with every check; torch is imported last."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.hub.data_sets import fetch_data_set
from mppo.hub.download import fetch_model
from mppo.hub.model_config import ModelConfigs
from mppo.parallel.environment import check_queues, set_for_training
from mppo.parallel.launch import LaunchInfo
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.load import Given, source_file
from mppo.recipe.rules.rule import has_interleaved_role, world_size_of
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig
from mppo.recipe.variables import unknown_variables
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import RankGuard
from mppo.trainer.start.loading import load_checked
from mppo.trainer.start.user_code import input_issues, odd_values
from mppo.trainer.start.user_parts import NO_PARTS, UserParts

if TYPE_CHECKING:
    from mppo.planning.describe import RunPlan


# modules that import torch, transformers or Megatron are imported inside functions: --help and the
# checks of a recipe's keys need none of them


def checked_recipe(
    given: Given,
    overrides: Sequence[str],
    info: LaunchInfo,
    world: int | None,
    planned: ModelConfigs | None = None,
    parts: UserParts = NO_PARTS,
) -> Recipe:
    """Load and check a recipe; the first rank prints remarks about it. ConfigError, ValueError: it
    cannot be run. ``world`` None: as many ranks as the recipe says. ``planned`` reads the models'
    configs for a plan, whose models, data, packages and device need not be on this machine."""
    remarks = unknown_variables(os.environ)
    is_planned = planned is not None
    recipe = load_checked(
        given,
        overrides,
        world,
        read_config if planned is None else planned.read,
        files=not is_planned,
        role_checks=(partial(check_role, planned=is_planned),),
        engine_check=partial(check_engine, on_cpu=False if is_planned else None),
        remarks=remarks,
        fetch_model=fetch_model if planned is None else planned.fetch,
        fetch_data_set=fetch_data_set,
        ranks_per_node=info.local_world_size if info.world_size > 1 else None,
        check_inputs=partial(input_issues, remarks=remarks if is_planned else None, parts=parts),
    )
    if info.rank == 0:
        found = planned.remarks if planned is not None else ()
        for remark in [*remarks, *odd_values(recipe), *found]:
            exit_report.say(remark)
    return recipe


def recipe_to_train(
    given: Given,
    overrides: Sequence[str],
    info: LaunchInfo,
    guard: RankGuard,
    parts: UserParts = NO_PARTS,
) -> Recipe:
    """Load and check a recipe for a run here, and this machine: device and packages. ConfigError,
    ValueError: it cannot be run. ``guard`` learns the recipe's time limit."""
    recipe = checked_recipe(given, overrides, info, info.world_size, parts=parts)
    guard.set_limit(recipe.trainer.heartbeat_timeout_s)
    interleaved = has_interleaved_role(recipe)
    # CUDA and NCCL read them later
    set_for_training(os.environ, recipe.rollout.sync == "distributed", interleaved)
    from mppo.parallel import device
    from mppo.parallel.node import check_versions

    device.check()
    if device.is_cuda():
        check_queues(os.environ, interleaved)
    remark = check_versions()
    if remark and info.rank == 0:
        exit_report.say(remark)
    return recipe


def scaled_recipe(given: Path, info: LaunchInfo) -> dict[str, Any]:
    """The scaled-down twin of a recipe (``scale_down``); the first rank prints what it changed."""
    from mppo.trainer.start.scaled_down import scale_down

    twin, lines = scale_down(given, info.world_size)
    for line in lines if info.rank == 0 else ():
        exit_report.say(line)
    return twin


def planned_run(
    given: Given, overrides: Sequence[str], info: LaunchInfo, world: int | None, gpu: str | None
) -> RunPlan:
    """Check a recipe and plan its run, for which neither weights nor a GPU are needed. Models that
    are not here have their config in ``configs`` beside the recipe's file. ``world`` None: ranks of
    the launcher, or as the recipe says. ``gpu`` is a name, or the memory in GiB; None: the
    recipe's, or the default. ConfigError, ValueError: it cannot be run; no such GPU."""
    if gpu is not None:
        find_gpu(gpu)  # before models are read
    configs = ModelConfigs(source_file(given))
    if world is None and info.world_size > 1:
        world = info.world_size
    recipe = checked_recipe(given, overrides, info, world, configs)
    from mppo.planning.describe import plan_run

    found = {role.name: configs.read(role.path) for role in recipe.roles()}
    return plan_run(recipe, world or world_size_of(recipe), found, gpu)


def read_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Read the config of a model; it imports transformers."""
    from mppo.hub.builtin import load_config

    return load_config(path, trust_remote_code)


def check_role(role: RoleConfig, config: Any, planned: bool = False) -> Iterator[ConfigIssue]:
    """What Megatron refuses of a role, and unless it is only planned, its weights."""
    from mppo.hub.check_weights import check_weights
    from mppo.models.overrides import override_issues

    yield from override_issues(role, config)
    if not planned:
        yield from check_weights(role, config)


def check_engine(recipe: Recipe, config: Any, on_cpu: bool | None) -> Iterable[ConfigIssue]:
    """What the rollout engine does not support in the actor's model; None: on this machine."""
    from mppo.rollout.sglang.model_support import engine_issues

    if recipe.trainer.replay is not None:
        return ()
    if on_cpu is None:
        from mppo.parallel import device

        on_cpu = not device.is_cuda()
    return engine_issues(recipe, config, on_cpu)


_UNUSED = re.compile(
    r"(actor|critic|ref|algorithm)\..*|data\.((sources\.\d+\.)?train_|ptx_files).*|"
    r"trainer\.(nnodes|n_gpus_per_node|logger|replay|total_|save_|schedule).*"
)
"""Keys that an evaluation does not read."""


def concerns_evaluation(key: str) -> bool:
    """Whether an evaluation reads a key: layouts, optimizers, training data, loggers and models of
    other roles may be those of another machine."""
    return _UNUSED.fullmatch(key) is None


NO_PROMPTS = ConfigIssue(
    "data.val_files",
    [],
    "there are no validation prompts",
    "set data.val_files, or a data.task and a data.val_size above 0",
)
"""Of an evaluation that would generate nothing."""


def evaluated_recipe(given: Given, overrides: Sequence[str], info: LaunchInfo) -> Recipe:
    """Load and check a recipe, its code and the rows of its validation files; the first rank prints
    remarks about it. ConfigError, ValueError: it cannot be evaluated."""
    remarks = unknown_variables(os.environ)
    recipe = load_checked(
        given,
        overrides,
        info.world_size,
        remarks=remarks,
        fetch_model=fetch_model,
        fetch_data_set=fetch_data_set,
        check_inputs=partial(input_issues, splits=("val",)),
        concerns=concerns_evaluation,
    )
    for remark in remarks if info.rank == 0 else ():
        exit_report.say(remark)
    sources = recipe.data.prompt_sources.values()
    if not any(x.val_size != 0 and (x.task or x.val_files) for x in sources):
        raise ConfigError([NO_PROMPTS])
    return recipe
