"""Train: recipe -> roles -> loop -> clean-up.

``torchrun --shutdown-timeout 300 mppo/train.py --config recipe.yaml [section.key=value ...]``
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.rules.rule import RoleCase, has_interleaved_role, roles_in_use, world_size_of
from mppo.config.schema import Recipe
from mppo.config.variables import unknown_variables
from mppo.hub.data_sets import fetch_data_set
from mppo.hub.download import fetch_model
from mppo.parallel.environment import check_queues, set_for_training
from mppo.parallel.launch import LaunchInfo, discover, launcher_patience_s, parents_command
from mppo.safety.redact import redacted_output
from mppo.simulation.model_config import ModelConfigs
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import RankGuard

# modules that import torch, transformers or Megatron are imported inside functions: --help and the
# checks of a recipe's keys need none of them

if TYPE_CHECKING:
    from mppo.trainer.run import Run


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Train; exit code 0, 2 for an invalid recipe or input, 1 for another failure."""
    arguments = _parse(argv)
    set_for_training(os.environ)  # before torch is imported: CUDA reads its variables once
    if not sys.warnoptions:
        # about optional packages and deprecated calls: a user cannot act on them
        warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed)\.")
    try:
        info = discover()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    guard = RankGuard(info)
    try:
        planned = arguments.dry_run  # the machine may differ from the run's
        configs = ModelConfigs(arguments.config)
        read_config = configs.read if planned else _read_config
        launched = info.world_size > 1 or not planned
        world = arguments.world_size or (info.world_size if launched else None)
        remarks = unknown_variables(os.environ)
        recipe = load_checked(
            arguments.config,
            arguments.overrides,
            world,
            read_config,
            files=not planned,
            role_checks=(partial(_check_role, planned=planned),),
            engine_check=partial(_check_engine, planned=planned),
            remarks=remarks,
            fetch_model=configs.fetch if planned else fetch_model,
            fetch_data_set=fetch_data_set,
            ranks_per_node=info.local_world_size if info.world_size > 1 else None,
        )
        for remark in [*remarks, *configs.remarks] if info.rank == 0 else ():
            exit_report.say(remark)
        if arguments.dry_run:
            planned_world = world or world_size_of(recipe)
            code = _dry_run(recipe, planned_world, info, read_config, arguments)
            return (_simulate(arguments) or code) if arguments.simulate and info.rank == 0 else code
        guard.set_limit(recipe.trainer.heartbeat_timeout_s)
        interleaved = has_interleaved_role(recipe)
        # CUDA and NCCL read them later
        set_for_training(os.environ, recipe.rollout.sync == "distributed", interleaved)
        _check_environment(info, interleaved)
    except (ConfigError, ValueError) as error:
        return exit_report.refuse_recipe(error, info.rank)
    from mppo.supervision.heartbeat import AlreadyReported, no_early_success

    try:
        with no_early_success():
            return _run(recipe, info, guard)
    except ConfigError as error:
        return exit_report.refuse_recipe(error, info.rank)
    except AlreadyReported as reported:
        return _exit_code(reported.__cause__)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # also SystemExit, which a user's function may raise
        from mppo.trainer.failures import report_failure

        report_failure(error, info, recipe)
        return _exit_code(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mppo-train", description=__doc__)
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    ranks = "number of ranks for --dry-run; default: nodes x GPUs of the recipe, or the fewest"
    parser.add_argument("--world-size", type=int, help=ranks)
    simulated = "after the plan, run every pipeline stage on a simulated GPU (docs/simulation.md)"
    parser.add_argument("--simulate", action="store_true", help=simulated)
    parser.add_argument("--gpu", help="GPU for --dry-run: its name, or its memory in GiB")
    picture = "for --dry-run: draw who is where in which phase (an image file, such as a.svg)"
    parser.add_argument("--picture", type=Path, help=picture)
    quiet = "print no line per step: trainer.console=quiet"
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.quiet:
        arguments.overrides.append("trainer.console=quiet")
    if arguments.simulate and not arguments.dry_run:
        parser.error("--simulate needs --dry-run: it simulates the run that is planned")
    if arguments.gpu and not arguments.dry_run:
        parser.error("--gpu needs --dry-run: it names the GPU for which memory is planned")
    if arguments.picture and not arguments.dry_run:
        parser.error("--picture needs --dry-run: it draws the plan")
    if arguments.world_size and not arguments.dry_run:
        parser.error(
            "--world-size needs --dry-run; without it the launcher sets the number of ranks"
        )
    return arguments


def _read_config(path: str | Path, trust_remote_code: bool = False):
    from mppo.hub.builtin import load_config

    return load_config(path, trust_remote_code)


def _check_role(role: RoleCase, config, planned: bool) -> Iterator[ConfigIssue]:
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


def _check_environment(info: LaunchInfo, interleaved: bool) -> None:
    """Check device and packages; the first rank says which packages are not the tested ones."""
    from mppo.parallel import device
    from mppo.parallel.node.versions import check_versions

    device.check()
    if device.is_cuda():
        check_queues(os.environ, interleaved)
    remark = check_versions()
    if remark and info.rank == 0:
        exit_report.say(remark)


def _simulate(arguments: argparse.Namespace) -> int:
    """The first rank of every pipeline stage, executed without a GPU."""
    from mppo.simulation.options import Options
    from mppo.simulation.program import run_program

    options = Options(arguments.world_size, all_stages=True, quick=True, gpu=arguments.gpu)
    return run_program(arguments.config, arguments.overrides, options)


def _dry_run(
    recipe: Recipe,
    world: int,
    info: LaunchInfo,
    read_config: Callable[..., Any],
    arguments: argparse.Namespace,
) -> int:
    """Print the plan; code 3 if the run does not fit its GPUs or hosts."""
    from mppo.planning.describe import dry_run

    if info.rank:
        return 0
    configs = {role.name: read_config(role.path) for role in roles_in_use(recipe)}
    return dry_run(recipe, world, configs, arguments.gpu, arguments.picture)


def _run(recipe: Recipe, info: LaunchInfo, guard: RankGuard) -> int:
    """Train and export, inside a process group that is destroyed on every exit."""
    from mppo.checkpoint.lock import run_folder_lock
    from mppo.parallel import device
    from mppo.parallel.process_group import process_group
    from mppo.report.opening import opening_lines
    from mppo.safety.private import private_files
    from mppo.safety.temporary import remove_leftovers
    from mppo.supervision import stop_request
    from mppo.supervision.heartbeat import CleanupDeadline, Heartbeat
    from mppo.supervision.stop_request import StepInterrupted, listening
    from mppo.trainer.failures import report_failure

    device.prepare_megatron()
    from mppo.trainer.loop import train
    from mppo.trainer.run_setup import build_run

    trainer = recipe.trainer
    silence_s = trainer.heartbeat_timeout_s
    hang_s = trainer.hang_timeout_s or 0.9 * trainer.collective_timeout_s
    stacks = trainer.run_dir / "stacks"
    on_failure = partial(report_failure, info=info, recipe=recipe)
    patience = launcher_patience_s(info, os.environ, parents_command())
    if info.local_rank == 0:
        remove_leftovers()
    with (
        private_files(trainer.run_dir),
        listening(trainer.stop_within_s, patience) as stop,
        CleanupDeadline() as deadline,
    ):
        guard.watch_other_nodes()
        stop_request.on_request(stop.exit_at_once)  # a rank that never comes would be waited for
        with (
            process_group(info, trainer.collective_timeout_s),
            Heartbeat(info, silence_s, hang_s, stacks, deadline, on_failure).running() as heartbeat,
            run_folder_lock(trainer.run_dir, exit_report.say),
        ):
            stop_request.on_request(None)
            guard.met()
            if info.rank == 0 and "console" in trainer.logger:
                print("\n".join(opening_lines(recipe, info)), flush=True)
            try:
                run = build_run(recipe, info, stop)
            except StepInterrupted:
                if info.rank == 0:
                    exit_report.say("stopped before the first step: nothing to save")
                return 0
            if run is None:
                return 0
            try:
                with heartbeat.report_failures():  # at once: run.stop() may take long
                    train(run)
                    _export(run)
            finally:
                run.stop()
    return 0


def _export(run: Run) -> None:
    """Export the actor as a Hugging Face folder, if all steps are done."""
    from mppo.supervision.phase import phase
    from mppo.trainer.run import exporting
    from mppo.trainer.run_folder import ACTOR, AVERAGE

    if run.recipe.trainer.export_hf and not run.checkpoints.stopped_early:
        with phase("export"), exporting(run.engine, run.roles):
            weights, folder = run.roles.actor.weights, run.folder.path
            kept = [weights.save(folder / ACTOR)]
            if weights.average is not None:
                kept.append(weights.save_average(folder / AVERAGE))
        for path in kept:
            if path is not None:
                run.reporter.line(f"kept {path}")


def _exit_code(error: BaseException | None) -> int:
    """2 for invalid input of the user, else 1."""
    from mppo.trainer.failures import is_bad_input

    return 2 if error is not None and is_bad_input(error) else 1


if __name__ == "__main__":
    sys.exit(main())
