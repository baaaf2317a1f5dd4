"""mppo in Python: what the programs do, as functions.

``import mppo`` imports none of this, and no torch: ``mppo.load`` and the others are found here when
they are first used.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.parallel.environment import set_for_training
from mppo.parallel.launch import LaunchInfo, discover
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe, source_file
from mppo.recipe.schema import Recipe
from mppo.report.run_record import RunRecord, read_run
from mppo.safety.input_error import InputError
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import RankGuard, start_guarded
from mppo.trainer.start.checked_recipe import planned_run, recipe_to_train
from mppo.trainer.start.user_parts import Callbacks, UserParts

if TYPE_CHECKING:  # they import torch
    from mppo.planning.describe import RunPlan
    from mppo.trainer.start.training_session import RunResult

__all__ = [
    "ConfigError", "InputError", "Recipe", "RunRecord", "load", "plan", "read_run", "train",
]  # fmt: skip


def load(source: str | Path | Mapping[str, Any], *overrides: str) -> Recipe:
    """Load a recipe. Its keys are checked; ``plan`` and ``train`` check all else.

    Args:
        source: the recipe's file, or its content as a mapping of sections; paths and numbers of
            numpy may be values, and ``base`` is relative to the working directory.
        overrides: keys that replace the recipe's, as ``section.key=value``.

    Raises:
        ConfigError: with all issues: key, value, why, and what to do.
        InputError: an override is not a text.
    """
    for override in overrides:
        if not isinstance(override, str):
            fix = "write mppo.load(recipe, 'section.key=value', ...), or *settings for a list"
            raise InputError(f"the override {override!r} is not a text; {fix}")
    remarks: list[str] = []
    recipe = load_recipe(source, overrides, remarks)
    if discover().rank == 0:
        for remark in remarks:
            exit_report.say(remark)
    return recipe.of_file(source_file(source))


def plan(recipe: Recipe, world_size: int | None = None, gpu: str | None = None) -> RunPlan:
    """Plan a run as ``mppo-plan`` does, without a GPU or weights: printable, with ``fits``,
    ``verdict`` and ``memory`` by phase and role.

    Args:
        world_size: number of ranks; None: those of the launcher, or as the recipe says.
        gpu: name of the GPU, or its memory in GiB; None: the recipe's, or the default.

    Raises:
        ConfigError: the recipe cannot be run.
    """
    return planned_run(recipe, (), discover(), world_size, gpu)


def train(
    recipe: Recipe,
    *,
    reward: Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
    callbacks: Sequence[object] = (),
) -> RunResult:
    """Train as ``mppo-train`` does: in this process, or on every rank that a launcher started.

    Args:
        reward: scores responses, with the parameters of ``reward.function``; it runs in this
            process, without the limits of ``reward.*``. None: as the recipe says.
        agent: answers the policy's turns, as ``rollout.agent.path`` does; in this process too.
            None: as the recipe says.
        callbacks: objects with ``on_step(step, metrics)``, ``on_batch(batch)`` or ``on_end()``,
            called on every rank.

    Returns:
        Run folder, steps that are done, and metrics of the last one.

    Raises:
        ConfigError: the recipe cannot be run here.
        InputError: data, the reward function, the agent or a callback is at fault.
    """
    set_for_training(os.environ)  # before torch is imported: CUDA reads its variables once
    parts = UserParts(reward, agent, Callbacks(callbacks))
    thresholds = gc.get_threshold()
    try:
        info, guard = start_guarded()
        checked = recipe_to_train(recipe, parts.overrides(), info, guard, parts)
        return _trained(checked, info, guard, parts)
    finally:
        gc.unfreeze()  # the run's objects: this process may train again
        gc.set_threshold(*thresholds)


def _trained(recipe: Recipe, info: LaunchInfo, guard: RankGuard, parts: UserParts) -> RunResult:
    from mppo.supervision.heartbeat import AlreadyReported, no_early_success
    from mppo.trainer.start.training_session import train_and_export

    try:
        with no_early_success():
            return train_and_export(recipe, info, guard, parts)
    except AlreadyReported as reported:
        error = reported.__cause__ or reported
        raise error from error.__cause__
