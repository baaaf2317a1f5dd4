"""Entry point: recipe -> roles -> loop -> teardown.

``torchrun --shutdown-timeout 300 mppo/train.py --config recipe.yaml [section.key=value ...]``
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mppo.algos.reward_normalization import RunningMoments
from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError
from mppo.config.rule import roles_in_use, world_size_of
from mppo.config.schema import Recipe
from mppo.config.variables import unknown_variables
from mppo.data.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.data.hub import fetch_model
from mppo.data.loader import PromptLoader
from mppo.data.source import PromptSet, load_prompts
from mppo.estimate import kl_controller
from mppo.faults import (
    is_bad_input,
    is_out_of_memory,
    is_told,
    out_of_memory_message,
    storage_message,
)
from mppo.models.overrides import override_faults
from mppo.opening import opening_lines
from mppo.parallel import device, last_words
from mppo.parallel.abandon import Abandoned, expect, meet
from mppo.parallel.heartbeat import Told, watching
from mppo.parallel.launch import (
    LaunchInfo,
    discover,
    launcher_patience_s,
    parents_command,
    process_group,
)
from mppo.parallel.phase import current, phase
from mppo.parallel.signals import StopRequest, listening
from mppo.parallel.way_out import WayOut
from mppo.report.redact import redact
from mppo.rollout.sglang_model import engine_faults
from mppo.weights.model_folder import companion_folder

if TYPE_CHECKING:
    from mppo.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit code 0, 2 for a faulty recipe, 1 for a failure while running."""
    arguments = _parse(argv)
    if not sys.warnoptions:
        # of parts not installed and calls on their way out: nothing a recipe can change
        warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed)\.")
    try:
        info = discover()
        if not arguments.dry_run:
            device.check()
    except ValueError as error:
        return last_words.refuse(error)
    try:
        started = info.world_size > 1 or not arguments.dry_run
        world = arguments.world_size or (info.world_size if started else None)
        planned = arguments.dry_run  # maybe on another machine than the run
        remarks = unknown_variables(os.environ)
        recipe = load_checked(
            arguments.config,
            arguments.overrides,
            world,
            _read_config,
            files=not planned,
            judge_role=override_faults,
            judge_engine=partial(engine_faults, on_cpu=not planned and not device.is_cuda()),
            remarks=remarks,
            fetch_model=fetch_model,
        )
        for remark in remarks if info.rank == 0 else ():
            _say(remark)
        if arguments.dry_run:
            return _dry_run(recipe, world or world_size_of(recipe), info)
    except (ConfigError, ValueError) as error:
        return last_words.refuse(error, info.rank)
    try:
        return _run(recipe, info)
    except ConfigError as error:
        return last_words.refuse(error, info.rank)
    except Told as told:
        return _exit_code(told.__cause__)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # a user function's SystemExit too has a rank and a phase
        _report_failure(error, info, recipe)
        return _exit_code(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mppo-train", description=__doc__)
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    planned = "ranks that --dry-run plans for; default: as many as the recipe asks for"
    parser.add_argument("--world-size", type=int, help=planned)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.world_size and not arguments.dry_run:
        parser.error("--world-size goes with --dry-run; otherwise the launcher decides")
    return arguments


@cache
def _read_config(path: str | Path, trust_remote_code: bool = False):
    return read_model_config(resolve_model(str(path)), trust_remote_code)


def _dry_run(recipe: Recipe, world: int, info: LaunchInfo) -> int:
    from mppo.config.plan import describe_plan

    if info.rank == 0:
        configs = {role.name: _read_config(role.path) for role in roles_in_use(recipe)}
        print(describe_plan(recipe, world, configs))
        print(f"# checkpoints\n{_checkpoints(recipe, world, recipe.trainer.total_training_steps)}")
    return 0


def _checkpoints(recipe: Recipe, world: int, steps: int | None) -> str:
    """When checkpoints are written, and the disk space they take."""
    from mppo.config.disk import describe_checkpoints
    from mppo.config.plan import plan_roles

    configs = {role.name: _read_config(role.path) for role in roles_in_use(recipe)}
    return describe_checkpoints(recipe, plan_roles(recipe, world, configs), steps)


def _run(recipe: Recipe, info: LaunchInfo) -> int:
    """Everything with a process group; the group is destroyed on every way out."""
    from mppo.checkpoint.lock import only_job_in

    device.prepare_megatron()
    trainer = recipe.trainer
    silence, hang = trainer.heartbeat_timeout_s, trainer.hang_timeout_s
    hang = hang or 0.9 * trainer.collective_timeout_s
    stacks, tell = _run_dir(recipe) / "stacks", partial(_report_failure, info=info, recipe=recipe)
    patience = launcher_patience_s(info, os.environ, parents_command())
    with (
        listening(trainer.stop_within_s, patience) as stop,
        WayOut() as way_out,
        process_group(info, trainer.collective_timeout_s),
        watching(info, silence, hang, stacks, way_out, tell) as heartbeat,
        only_job_in(_run_dir(recipe), _say),
    ):
        run_dir = _run_dir(recipe)
        if info.rank == 0 and "console" in recipe.trainer.logger:
            print("\n".join(opening_lines(recipe, info, run_dir)), flush=True)
        try:
            run = build_run(recipe, info, stop)
        except Abandoned:
            if info.rank == 0:
                _say("stopped before the first step: there is nothing to save")
            return 0
        if run is None:
            return 0
        try:
            with heartbeat.telling():  # not only after stopping, which may take long
                _train(run)
        finally:
            run.stop()
    return 0


def _train(run: Run) -> None:
    """All steps, then the actor as a Hugging Face folder."""
    from mppo.loop import train
    from mppo.run_folder import ACTOR, AVERAGE

    train(run)
    if run.recipe.trainer.export_hf and not run.checkpoints.stopped_early:
        with phase("export"):
            actor, folder = run.roles.actor, run.folder.path
            kept = [actor.save(folder / ACTOR)]
            if actor.average is not None:
                kept.append(actor.save_average(folder / AVERAGE))
        for path in kept:
            if path is not None:
                run.reporter.line(f"kept {path}")


def _run_dir(recipe: Recipe) -> Path:
    trainer = recipe.trainer
    return Path(trainer.default_local_dir or Path("runs") / trainer.experiment_name)


def build_run(recipe: Recipe, info: LaunchInfo, stop: StopRequest) -> Run | None:
    """Prompts, models, engine, scorer, reporter and checkpoints of a run. Collective.

    Returns:
        None where the run has finished already.

    Raises:
        Abandoned: the run is asked to stop.
    """
    from mppo.checkpoint.checkpointer import Checkpointer
    from mppo.parallel.groups import GroupRegistry
    from mppo.report.reporter import Reporter
    from mppo.rewards.scorer import build_scorer
    from mppo.roles import Roles, trained_models
    from mppo.rollout.build import build_engine
    from mppo.run import Run
    from mppo.run_folder import CHECKPOINTS, RunFolder, check_model_folders

    expect(math.inf)
    trainer, is_main = recipe.trainer, info.rank == 0
    folder = resolve_model(recipe.model.path)
    read_config = partial(_read_config, trust_remote_code=recipe.model.trust_remote_code)
    tokenizer = load_tokenizer(
        recipe.model.tokenizer_path or folder, recipe.model.trust_remote_code
    )
    training, validation, prompts = _load_prompts(recipe, tokenizer)
    scorer = build_scorer(recipe.reward, tokenizer, recipe.data.max_response_length)
    scorer.check([*training.prompts, *validation.prompts])
    total_steps = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch
    plain, run_dir = recipe.model_dump(mode="json"), _run_dir(recipe)
    reporter = Reporter(run_dir, trainer, plain, total_steps, is_main)
    announce = partial(_announce, reporter, trainer.logger)
    with phase("looking at the run folder"):
        models = trained_models(recipe, folder, read_config)
        run_folder = RunFolder(run_dir, recipe, total_steps, models, announce)
        if run_folder.finished:
            return None
        check_model_folders(recipe)
    reporter.line(f"checkpoints: {_checkpoints(recipe, info.world_size, total_steps)}")
    reporter.line(f"prompts: {training.summary()}; validation: {validation.summary()}")
    registry = GroupRegistry(trainer.seed)
    folder = _starting_model(recipe, folder, training, tokenizer, registry, reporter, run_folder)
    text = _plain_text(recipe, tokenizer) if recipe.actor.ptx_coef else None
    meet()
    roles = Roles(recipe, folder, read_config, registry, total_steps, text)
    if roles.critic is not None and roles.critic.fresh:
        reporter.line(f"the critic begins with a fresh value head ({roles.critic.spec.folder})")
    meet()
    with phase("starting the rollout engine"):
        engine = build_engine(recipe, companion_folder(folder), read_config(folder), run_dir)
    kl, moments = kl_controller(recipe.algorithm.kl_ctrl), RunningMoments()
    parts = {"prompts": prompts, "kl": kl, "moments": moments, "roles": roles}
    saver = Checkpointer(
        trainer, run_dir / CHECKPOINTS, roles.trained, parts, redact(plain), stop, announce
    )
    return Run(
        recipe=recipe,
        tokenizer=tokenizer,
        prompts=prompts,
        validation=validation,
        engine=engine,
        scorer=scorer,
        roles=roles,
        kl=kl,
        moments=moments,
        checkpoints=saver,
        reporter=reporter,
        folder=run_folder,
        total_steps=total_steps,
    )


def _load_prompts(recipe: Recipe, tokenizer) -> tuple[PromptSet, PromptSet, PromptLoader]:
    """Training and validation prompts, and the batches of the former."""
    data = recipe.data
    with phase("loading prompts"):
        training = load_prompts(data, tokenizer, "train")
        validation = load_prompts(data, tokenizer, "val")
    return (
        training,
        validation,
        PromptLoader(training, data.train_batch_size, data.shuffle, data.seed),
    )


def _starting_model(
    recipe: Recipe, folder: Path, prompts: PromptSet, tokenizer, registry, reporter, run_folder
) -> Path:
    """The folder that the actor starts from, and what has no folder of its own: that of
    ``model.path``, or of a warm start from it. Collective."""
    from mppo.run_folder import WARM_START
    from mppo.warm_start import warm_start

    steps = recipe.trainer.warm_start_steps
    if not steps:
        return folder
    started = run_folder.warm_start()
    if started is not None:
        return started
    if run_folder.found is not None:
        reporter.line(f"{run_folder.path / WARM_START} is not there any more: it is made again")
    run_folder.begin()
    out, show = run_folder.path / WARM_START, partial(_show_warm_start, reporter, steps)
    config = _read_config(folder, trust_remote_code=recipe.model.trust_remote_code)
    kept = warm_start(recipe, folder, config, prompts, tokenizer, registry, out, on_step=show)
    if kept is not None:
        reporter.line(f"kept {kept}")
    return out


def _plain_text(recipe: Recipe, tokenizer):
    """The documents of ``data.ptx_files``."""
    from mppo.data.documents import load_documents
    from mppo.plain_text import PlainText

    data, actor = recipe.data, recipe.actor
    size = data.ptx_batch_size or actor.ppo_mini_batch_size * recipe.rollout.n
    with phase("loading plain text"):
        documents = load_documents(data, tokenizer)
    return PlainText(PromptLoader(documents, size, data.shuffle, data.seed), actor.ptx_coef)


def _show_warm_start(reporter, total: int, step: int, loss: float) -> None:
    """A line for every tenth of the warm start."""
    if step == total or step % max(total // 10, 1) == 0:
        reporter.line(f"warm start {step}/{total}: loss {loss:.3f}")


def _announce(reporter, loggers: Sequence[str], text: str) -> None:
    """A line that must be seen, with or without the console logger."""
    if "console" in loggers:
        reporter.line(text)
    elif reporter.is_main:
        _say(text)


def _say(text: str) -> None:
    print(f"mppo: {text}", file=sys.stderr, flush=True)


def _report_failure(error: BaseException, info: LaunchInfo, recipe: Recipe) -> None:
    if not is_told(error) or "MPPO_TRACEBACK" in os.environ:
        traceback.print_exception(error)
    where = f"rank {info.rank} of {info.world_size}"
    kind = "" if is_bad_input(error) else f"{type(error).__name__}: "
    what = storage_message(error) or f"{kind}{error}"
    lines = [f"mppo: {where} failed while {current()}: {what}"]
    if is_out_of_memory(error):
        lines.append(f"mppo: {where}: {out_of_memory_message(current(), recipe)}")
    text = "\n".join(lines)
    print(text, file=sys.stderr, flush=True)
    last_words.leave(text)


def _exit_code(error: BaseException | None) -> int:
    """2 where the run was given something it cannot use, else 1."""
    return 2 if error is not None and is_bad_input(error) else 1


if __name__ == "__main__":
    sys.exit(main())
