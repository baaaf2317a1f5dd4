"""What a run needs, without starting it: layouts, memory by phase, and whether it fits.

``python mppo/plan.py --config recipe.yaml [section.key=value ...]``, or ``mppo-train --dry-run``.
It needs no GPU and no weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mppo.parallel.environment import set_for_training
from mppo.parallel.launch import LaunchInfo
from mppo.recipe.errors import ConfigError, ConfigIssue, config_error
from mppo.recipe.extras import SIMULATION
from mppo.safety.redact import redacted_output
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import start_guarded
from mppo.trainer.start.checked_recipe import planned_run

if TYPE_CHECKING:
    from mppo.planning.time.step_text import TimeOptions


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Plan; exit code 0, 2 for an invalid recipe or input, 3 if the run does not fit."""
    parser = argparse.ArgumentParser(prog="mppo-plan", description=__doc__)
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    add_plan_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return print_plan(parser.parse_intermixed_args(argv))


def add_plan_options(parser: argparse._ActionsContainer) -> None:
    ranks = "number of ranks; default: nodes x GPUs of the recipe, or the fewest"
    parser.add_argument("--world-size", type=int, help=ranks)
    simulated = "after the plan, run every pipeline stage on a simulated GPU (docs/simulation.md)"
    parser.add_argument("--simulate", action="store_true", help=simulated)
    parser.add_argument("--gpu", help="the GPU's name, or its memory in GiB")
    picture = (
        "draw who is where in which phase, with --time the seconds of a step (an image file, "
        "such as a.svg)"
    )
    parser.add_argument("--picture", type=Path, help=picture)
    shown = "after the plan, print the recipe with all its keys"
    parser.add_argument("--show-recipe", action="store_true", help=shown)
    timed = "predict the seconds of a step (docs/planning.md; needs mppo[plan])"
    parser.add_argument("--time", action="store_true", help=timed)
    searched = "with --time: search layouts, and write the best as a recipe to this file"
    parser.add_argument("--search", type=Path, metavar="FILE", help=searched)
    price = "with --time: price of a GPU for an hour, for the cost of a step"
    parser.add_argument("--price", type=float, help=price)
    for what in ("prompt", "response"):
        mean = f"with --time: mean tokens of a {what}; default: the recipe's limit"
        parser.add_argument(f"--mean-{what}", type=float, help=mean)
    lengths = "with --time: the lengths of a run's dumped steps instead (trainer.dump_rollouts)"
    parser.add_argument("--lengths", type=Path, metavar="FOLDER", help=lengths)
    turns = "with --time: mean turns of the policy in an episode of rollout.agent"
    parser.add_argument("--turns", type=float, help=turns)
    for what, does in (("seconds", "needs"), ("tokens", "adds")):
        turn = f"with --turns: {what} that the agent {does} after a turn of the policy"
        parser.add_argument(f"--turn-{what}", type=float, help=turn)
    prompts = "with --time: count validation, of so many prompts"
    parser.add_argument("--val-prompts", type=int, help=prompts)
    disk = "with --time: count checkpoints, written at so many GB/s by all ranks together"
    parser.add_argument("--disk", type=float, help=disk)


_PICTURES = (".svg", ".png", ".pdf")


def print_plan(arguments: argparse.Namespace) -> int:
    """Check the recipe of ``arguments`` and print its plan on the first rank; return the exit code
    of the plan, or of the simulation that follows it if that is not 0."""
    set_for_training(os.environ)  # before torch is imported: CUDA reads its variables once
    try:
        info, _ = start_guarded()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    try:
        return _plan(arguments, info)
    except ValueError as error:
        return exit_report.refuse_recipe(error, info.rank)


def _plan(arguments: argparse.Namespace, info: LaunchInfo) -> int:
    _check_options(arguments)
    found = planned_run(
        arguments.config, arguments.overrides, info, arguments.world_size, arguments.gpu
    )
    missing = SIMULATION.issue("--simulate", True) if arguments.simulate else None
    if missing is not None:
        raise ConfigError([missing])
    if info.rank:
        return 0
    from mppo.planning.describe import draw_plan
    from mppo.planning.verdict import EXIT_TOO_LARGE
    from mppo.recipe.load import resolved_yaml

    timing = None
    if arguments.time:
        timing = found.timing(_time_options(arguments))
    print(found)
    if timing is not None:
        print(f"\n{timing()}")
    elif arguments.picture is not None:
        draw_plan(found, arguments.picture)
    if arguments.show_recipe:
        print(f"\n# resolved recipe\n{resolved_yaml(found.recipe).rstrip()}")
    code = 0 if found.fits else EXIT_TOO_LARGE
    if arguments.simulate:
        simulate = SIMULATION.load("--simulate", True)
        options = (arguments.world_size, arguments.gpu)
        return simulate(arguments.config, arguments.overrides, *options) or code
    return code


def _time_options(arguments: argparse.Namespace) -> TimeOptions:
    from mppo.planning.time.role_load import AgentTurns
    from mppo.planning.time.step_text import TimeOptions
    from mppo.planning.time.upkeep import Upkeep

    own = vars(arguments)
    turns = AgentTurns(
        count=1.0 if own["turns"] is None else own["turns"],
        seconds=own["turn_seconds"] or 0.0,
        tokens=own["turn_tokens"] or 0.0,
    )
    disk = None if own["disk"] is None else own["disk"] * 1e9
    return TimeOptions(
        prompt=own["mean_prompt"],
        response=own["mean_response"],
        price=own["price"],
        search=own["search"],
        picture=own["picture"],
        lengths=own["lengths"],
        turns=turns,
        upkeep=Upkeep(prompts=own["val_prompts"], disk=disk),
    )


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has an effect only with another one, or without it, and
    for a file that cannot be written."""
    timed = ("mean_prompt", "mean_response", "price", "search", "lengths", "turns",
             "val_prompts", "disk")  # fmt: skip
    of_turns, searched = ("turn_seconds", "turn_tokens"), ("val_prompts", "disk")
    own = vars(arguments)

    def issues(names: Sequence[str], why: str, fix: str) -> list[ConfigIssue]:
        return [
            ConfigIssue(f"--{name.replace('_', '-')}", _plain(own[name]), why, fix)
            for name in names
            if own[name] is not None
        ]

    found: list[ConfigIssue] = []
    if not own["time"]:
        found += issues(timed, "it has an effect only with --time", "add --time")
    if own["turns"] is None:
        found += issues(of_turns, "it has an effect only with --turns", "add --turns")
    if own["search"] is not None:
        fix = "remove it, and plan the recipe that was written with it"
        found += issues(searched, "a search compares steps without it", fix)
    if found:
        raise ConfigError(found)
    _check_files(arguments)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _check_files(arguments: argparse.Namespace) -> None:
    picture, search = arguments.picture, arguments.search
    if picture is not None and picture.suffix not in _PICTURES:
        fix = f"name a file that ends with one of {', '.join(_PICTURES)}"
        raise config_error("--picture", str(picture), "unknown kind of image", fix)
    if search is not None and search.exists():
        raise config_error("--search", str(search), "it exists", "name a new file")
    for option, path in (("--picture", picture), ("--search", search)):
        if path is not None and not path.absolute().parent.is_dir():
            why = f"the folder {path.parent} does not exist"
            raise config_error(option, str(path), why, "make it first")


if __name__ == "__main__":
    sys.exit(main())
