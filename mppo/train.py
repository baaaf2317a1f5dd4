"""Train: recipe -> roles -> loop -> clean-up.

``torchrun --shutdown-timeout 300 mppo/train.py --config recipe.yaml [section.key=value ...]``
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.parallel.environment import set_for_training
from mppo.plan import add_plan_options, print_plan
from mppo.safety.redact import redacted_output
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import start_guarded
from mppo.trainer.start.checked_recipe import recipe_to_train, scaled_recipe
from mppo.trainer.start.user_parts import UserParts

# modules that import torch, transformers or Megatron are imported inside functions: --help and the
# checks of a recipe's keys need none of them


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Train; exit code 0, 2 for an invalid recipe or input, 1 for another failure, also for a
    value pretraining whose gate did not hold."""
    arguments = _parse(argv)
    if arguments.dry_run:
        return print_plan(arguments)
    set_for_training(os.environ)  # before torch is imported: CUDA reads its variables once
    try:
        info, guard = start_guarded()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    try:
        given = arguments.config
        if arguments.scale_down:
            given = scaled_recipe(given, info)
        recipe = recipe_to_train(given, arguments.overrides, info, guard)
    except ValueError as error:
        return exit_report.refuse_recipe(error, info.rank)
    from mppo.supervision.heartbeat import no_early_success
    from mppo.trainer.failures import exit_code

    try:
        with no_early_success():
            from mppo.trainer.start.training_session import train_and_export

            result = train_and_export(recipe, info, guard, UserParts())
            return 1 if result.gate_held is False else 0
    except BaseException as error:  # also SystemExit, which a user's function may raise
        return exit_code(error, info, recipe)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mppo-train", description=__doc__)
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    add_plan_options(parser.add_argument_group("with --dry-run"))
    small = "train 2 steps of the recipe's small twin: tiny model of the same family, built-in data"
    parser.add_argument("--scale-down", action="store_true", help=small)
    quiet = "print no line per step: trainer.console=quiet"
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = sys.argv[1:] if argv is None else argv
    dashed = [each for each in given if re.match(r"--\w+\.\w", each)]
    if dashed:
        parser.error(f"a key of the recipe has no dashes: write {dashed[0].removeprefix('--')}")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.config is None and not arguments.overrides:
        parser.error("give a recipe: --config recipe.yaml")
    if arguments.scale_down and arguments.config is None:
        parser.error("--scale-down needs a recipe: --config recipe.yaml")
    if arguments.scale_down and arguments.dry_run:
        parser.error("--scale-down runs the recipe's small twin: leave out --dry-run")
    if arguments.quiet:
        arguments.overrides.append("trainer.console=quiet")
    planned = argparse.ArgumentParser()
    add_plan_options(planned)
    for option, default in vars(planned.parse_args([])).items():
        if getattr(arguments, option) != default and not arguments.dry_run:
            why = _WITH_DRY_RUN.get(option, ": it is for a prediction")
            parser.error(f"--{option.replace('_', '-')} needs --dry-run{why}")
    return arguments


_WITH_DRY_RUN = {
    "simulate": ": it simulates the run that is planned",
    "gpu": ": it names the GPU for which memory is planned",
    "show_recipe": ": it prints the recipe below the plan",
    "picture": ": it draws the plan",
    "time": ": it predicts the time of a step of the run that is planned",
    "search": ": it searches layouts for the run that is planned",
    "world_size": "; without it the launcher sets the number of ranks",
}
"""Options of a plan, and why a run has none; those that are left out are for a prediction."""


if __name__ == "__main__":
    sys.exit(main())
