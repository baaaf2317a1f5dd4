"""The simulation program: reads and checks its input, simulates, returns an exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mppo.hub.model_config import ModelConfigs
from mppo.planning.fit import planned_gpu
from mppo.planning.verdict import EXIT_TOO_LARGE
from mppo.recipe.errors import ConfigError
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.rules.rule import world_size_of
from mppo.supervision import exit_report
from mppo.trainer.start.loading import load_checked
from mppo_simulate.gpu import te_stand_in
from mppo_simulate.options import Options

EXIT_FINDING = 1


def run_program(config: Path | None, overrides: Sequence[str], options: Options) -> int:
    """Simulate a recipe and print the report.

    Args:
        config: file of the recipe; None: the recipe consists of ``overrides`` only.
        overrides: keys that replace the recipe's, as ``section.key=value``.
        options: the options of the simulation.

    Returns:
        The exit code.
    """
    configs = ModelConfigs(config)
    try:
        _check_environment(options)
        if options.gpu is not None:
            find_gpu(options.gpu)  # before models are read
        recipe = load_checked(config, overrides, options.world_size, configs.read, files=False)
        world_size = options.world_size or world_size_of(recipe)
        gpu = planned_gpu(recipe, options.gpu)
        _check_numbers(options, world_size)
        if options.transformer_engine is not None:
            te_stand_in.install(options.transformer_engine)
    except (ConfigError, ValueError) as error:
        return exit_report.refuse_recipe(error)
    for remark in configs.remarks:
        exit_report.say(remark)
    if options.all:
        from mppo_simulate.together.together_run import simulate_all

        return 0 if simulate_all(recipe, configs, world_size, gpu, options) else EXIT_FINDING
    from mppo_simulate.run import simulate_run

    return EXIT_TOO_LARGE if not simulate_run(recipe, configs, world_size, gpu, options) else 0


def simulate_stages(
    config: Path | None, overrides: Sequence[str], world_size: int | None, gpu: str | None
) -> int:
    """Simulate the first rank of every pipeline stage quickly, after a recipe's plan.

    ``mppo-train --dry-run --simulate`` finds it by its entry point. Arguments and exit code are
    those of ``run_program``.
    """
    return run_program(config, overrides, Options(world_size, all_stages=True, quick=True, gpu=gpu))


def _check_numbers(options: Options, world_size: int) -> None:
    if not 0 <= options.rank < world_size:
        raise ValueError(
            f"--rank {options.rank}: the world has {world_size} ranks; choose one from 0 to "
            f"{world_size - 1}"
        )
    timeline: Path | None = options.timeline
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise ValueError(f"--timeline {timeline}: no folder {timeline.parent}; make it first")
    if options.at_once < 1:
        raise ValueError(f"--at-once {options.at_once}: simulate at least one rank at a time")
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: simulate at least one step")


def _check_environment(options: Options) -> None:
    from mppo_simulate.gpu import torch_guard

    if not torch_guard.is_supported():
        raise ValueError("mppo-simulate needs Linux on x86_64 or aarch64: run it there")
    if os.environ.get("MPPO_DEVICE") == "cpu":
        raise ValueError("MPPO_DEVICE=cpu, but mppo-simulate simulates GPUs: unset the variable")
    installed = find_spec("transformer_engine")
    if options.transformer_engine is None and installed is not None and installed.origin:
        folder = Path(installed.origin).parents[1]
        raise ValueError(
            "Transformer Engine is installed, and its kernels need a GPU: run mppo-simulate with "
            f"--transformer-engine {folder}, which puts a stand-in under its Python "
            "(docs/simulation.md)"
        )
