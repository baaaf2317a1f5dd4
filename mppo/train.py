"""Train: recipe -> roles -> loop -> clean-up.

``torchrun --shutdown-timeout 300 mppo/train.py --config recipe.yaml [section.key=value ...]``
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.config.errors import ConfigError
from mppo.config.rules.rule import has_interleaved_role
from mppo.config.schema import Recipe
from mppo.parallel.environment import check_queues, set_for_training
from mppo.parallel.launch import LaunchInfo
from mppo.plan import add_plan_options, plan
from mppo.safety.input_error import InputError
from mppo.safety.redact import redacted_output
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import start_guarded
from mppo.trainer.start.checked_recipe import checked_recipe

# modules that import torch, transformers or Megatron are imported inside functions: --help and the
# checks of a recipe's keys need none of them


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Train; exit code 0, 2 for an invalid recipe or input, 1 for another failure."""
    arguments = _parse(argv)
    if arguments.dry_run:
        return plan(arguments)
    set_for_training(os.environ)  # before torch is imported: CUDA reads its variables once
    try:
        info, guard = start_guarded()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    try:
        recipe = checked_recipe(arguments.config, arguments.overrides, info, info.world_size)
        guard.set_limit(recipe.trainer.heartbeat_timeout_s)
        _check_machine(recipe, info)
    except ValueError as error:
        return exit_report.refuse_recipe(error, info.rank)
    from mppo.supervision.heartbeat import AlreadyReported, no_early_success
    from mppo.trainer.failures import report_failure

    try:
        with no_early_success():
            from mppo.trainer.start.session import train_and_export

            return train_and_export(recipe, info, guard)
    except ConfigError as error:
        return exit_report.refuse_recipe(error, info.rank)
    except AlreadyReported as reported:
        cause = reported.__cause__
        return 2 if isinstance(cause, InputError) else 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # also SystemExit, which a user's function may raise
        report_failure(error, info, recipe)
        return 2 if isinstance(error, InputError) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mppo-train", description=__doc__)
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    add_plan_options(parser.add_argument_group("with --dry-run"))
    quiet = "print no line per step: trainer.console=quiet"
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.quiet:
        arguments.overrides.append("trainer.console=quiet")
    for option, why in _PLANNED.items():
        if getattr(arguments, option) and not arguments.dry_run:
            parser.error(f"--{option.replace('_', '-')} needs --dry-run{why}")
    return arguments


_PLANNED = {
    "simulate": ": it simulates the run that is planned",
    "gpu": ": it names the GPU for which memory is planned",
    "picture": ": it draws the plan",
    "world_size": "; without it the launcher sets the number of ranks",
}
"""Options of a plan, and why a run has none."""


def _check_machine(recipe: Recipe, info: LaunchInfo) -> None:
    """Check device and packages; the first rank says which packages are not the tested ones."""
    interleaved = has_interleaved_role(recipe)
    # CUDA and NCCL read them later
    set_for_training(os.environ, recipe.rollout.sync == "distributed", interleaved)
    from mppo.parallel import device
    from mppo.parallel.node.versions import check_versions

    device.check()
    if device.is_cuda():
        check_queues(os.environ, interleaved)
    remark = check_versions()
    if remark and info.rank == 0:
        exit_report.say(remark)


if __name__ == "__main__":
    sys.exit(main())
