"""``mppo-simulate``: what a recipe does on its GPUs, without a GPU, weights or a download.

``mppo-simulate recipe.yaml --world-size 32`` executes one rank of the run at its real size on
tensors that have a shape but no data, and prints memory by phase and purpose, operations, waits of
the host for the GPU, communication, and whether the rank fits a GPU. docs/simulation.md says what
that covers and what it cannot.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError
from mppo.config.rules.rule import world_size_of
from mppo.safety.redact import redacted_output
from mppo.simulation.gpu_types import find_gpu
from mppo.supervision import last_words

EXIT_TOO_LARGE = 3
"""The recipe does not fit the GPU."""


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; exit code 0, 2 for bad input, 3 where a rank does not fit its GPU, 1 where the
    simulated code fails."""
    arguments = _parse(argv)
    return simulate(arguments.config, arguments.overrides, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what to simulate."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rank", type=int, default=0, help="which rank (default 0)")
    chosen.add_argument(
        "--all-stages", action="store_true", help="the first rank of every pipeline stage"
    )
    parser.add_argument("--steps", type=int, default=2, help="PPO steps (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="few layers and micro-batches, scaled to the recipe's"
    )
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        help="the GPU's name, or its memory in GiB (default h100-80gb)",
    )
    parser.add_argument("--timeline", type=Path, help="write a Chrome trace of the memory here")


def simulate(config: Path, overrides: Sequence[str], arguments: argparse.Namespace) -> int:
    """Simulate a recipe and print the report.

    Args:
        config: the recipe's file.
        overrides: ``section.key=value``.
        arguments: those of ``add_arguments``, and ``world_size``.

    Returns:
        The exit code.
    """
    from mppo.simulation.model_config import ModelConfigs

    configs = ModelConfigs(config)
    try:
        gpu = find_gpu(arguments.gpu)
        _check_environment()
        recipe = load_checked(config, overrides, arguments.world_size, configs.read, files=False)
        world_size = arguments.world_size or world_size_of(recipe)
        _check_numbers(arguments, world_size)
    except (ConfigError, ValueError) as error:
        return last_words.refuse_recipe(error)
    for remark in configs.remarks:
        last_words.say(remark)
    from mppo.simulation.run import simulate_run

    return EXIT_TOO_LARGE if not simulate_run(recipe, configs, world_size, gpu, arguments) else 0


def _check_numbers(arguments: argparse.Namespace, world_size: int) -> None:
    if not 0 <= arguments.rank < world_size:
        raise ValueError(
            f"--rank {arguments.rank}: the world has {world_size} ranks; choose one from 0 to "
            f"{world_size - 1}"
        )
    if arguments.steps < 1:
        raise ValueError(f"--steps {arguments.steps}: simulate at least one step")


def _check_environment() -> None:
    from mppo.simulation import torch_guard

    if not torch_guard.is_supported():
        raise ValueError("mppo-simulate needs Linux on x86_64 or aarch64: run it there")
    if os.environ.get("MPPO_DEVICE") == "cpu":
        raise ValueError("MPPO_DEVICE=cpu, but mppo-simulate simulates GPUs: unset the variable")


def _parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="mppo-simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="recipe (YAML)")
    parser.add_argument("--world-size", type=int, help="ranks; default: as the recipe asks for")
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
