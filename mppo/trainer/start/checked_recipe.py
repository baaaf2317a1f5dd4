"""The recipe of a run or a plan, with every check; those that import torch come last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigIssue
from mppo.config.schema import Recipe
from mppo.config.sections.role_config import RoleConfig
from mppo.config.variables import unknown_variables
from mppo.hub.data_sets import fetch_data_set
from mppo.hub.download import fetch_model
from mppo.hub.model_config import ModelConfigs
from mppo.parallel.launch import LaunchInfo
from mppo.supervision import exit_report

# modules that import torch, transformers or Megatron are imported inside functions: --help and the
# checks of a recipe's keys need none of them


def checked_recipe(
    config: Path | None,
    overrides: Sequence[str],
    info: LaunchInfo,
    world: int | None,
    planned: ModelConfigs | None = None,
) -> Recipe:
    """Load and check a recipe; the first rank prints remarks about it.

    Args:
        config: file of the recipe; None: it consists of ``overrides`` only.
        overrides: keys that replace the recipe's, as ``section.key=value``.
        info: this process's place.
        world: number of ranks; None: as the recipe says.
        planned: reads the models' configs for a plan, whose models, data, packages and device need
            not be on this machine; None: for a run here.

    Raises:
        ConfigError, ValueError: it cannot be run.
    """
    remarks = unknown_variables(os.environ)
    is_planned = planned is not None
    recipe = load_checked(
        config,
        overrides,
        world,
        _read_config if planned is None else planned.read,
        files=not is_planned,
        role_checks=(partial(_check_role, planned=is_planned),),
        engine_check=partial(_check_engine, planned=is_planned),
        remarks=remarks,
        fetch_model=fetch_model if planned is None else planned.fetch,
        fetch_data_set=fetch_data_set,
        ranks_per_node=info.local_world_size if info.world_size > 1 else None,
    )
    if info.rank == 0:
        for remark in [*remarks, *(planned.remarks if planned is not None else ())]:
            exit_report.say(remark)
    return recipe


def _read_config(path: str | Path, trust_remote_code: bool = False):
    from mppo.hub.builtin import load_config

    return load_config(path, trust_remote_code)


def _check_role(role: RoleConfig, config, planned: bool) -> Iterator[ConfigIssue]:
    from mppo.hub.check_weights import check_weights
    from mppo.models.overrides import override_issues

    yield from override_issues(role, config)
    if not planned:
        yield from check_weights(role, config)


def _check_engine(recipe: Recipe, config, planned: bool) -> Iterable[ConfigIssue]:
    from mppo.parallel import device
    from mppo.rollout.sglang.model_support import engine_issues

    if recipe.trainer.replay is not None:
        return ()
    return engine_issues(recipe, config, on_cpu=not planned and not device.is_cuda())
