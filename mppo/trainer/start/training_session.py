"""A training run from its process group to its exported model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mppo.checkpoint.lock import run_folder_lock
from mppo.parallel import device
from mppo.parallel.launch import LaunchInfo, keep_imports, launcher_patience_s, parents_command
from mppo.parallel.process_group import process_group
from mppo.recipe.schema import Recipe
from mppo.report.opening import opening_lines
from mppo.report.run_record import finished_steps, read_run
from mppo.safety.temporary import private_files, remove_leftovers
from mppo.supervision import exit_report, stop_request
from mppo.supervision.heartbeat import CleanupDeadline, Heartbeat
from mppo.supervision.phase import begin, phase
from mppo.supervision.rank_guard import RankGuard
from mppo.supervision.stop_request import StepInterrupted, listening
from mppo.trainer.failures import report_failure
from mppo.trainer.start.user_parts import UserParts

if TYPE_CHECKING:
    from mppo.trainer.run import Run


@dataclass(frozen=True)
class RunResult:
    """What a run has done: PPO steps, those of earlier starts included, and metrics of the last one
    (empty if this start made none). ``gate_held``: None unless a value pretraining has ended."""

    folder: Path
    steps: int
    metrics: Mapping[str, float]
    gate_held: bool | None = None


def train_and_export(
    recipe: Recipe, info: LaunchInfo, guard: RankGuard, parts: UserParts
) -> RunResult:
    """Train and export, inside a process group that is destroyed on every exit. Collective."""
    device.prepare_megatron()  # before modules import Megatron
    from mppo.trainer.loop import train
    from mppo.trainer.run_setup import build_run

    begin()
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
                run = build_run(recipe, info, stop, parts)
            except StepInterrupted:
                if info.rank == 0:
                    exit_report.say("stopped before the first step: nothing to save")
                return RunResult(trainer.run_dir, 0, {})
            if run is None:
                return _finished(recipe)
            try:
                keep_imports()
                with heartbeat.report_failures():  # at once: run.stop() may take long
                    train(run)
                    _export(run)
                    run.callbacks.on_end()
            finally:
                run.stop()
    return RunResult(trainer.run_dir, *run.last, _gate_held(run))


def _finished(recipe: Recipe) -> RunResult:
    folder = recipe.trainer.run_dir
    rows = read_run(folder).metrics
    metrics = {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}
    held = None
    if recipe.pretrains_value:
        from mppo.trainer.value_gate import IN_A_ROW

        held = metrics.get(IN_A_ROW, 0.0) >= recipe.trainer.value_gate.batches
    return RunResult(folder, finished_steps(folder), metrics, held)


def _gate_held(run: Run) -> bool | None:
    gate = run.roles.gate
    if gate is None or run.checkpoints.stopped_early:
        return None
    from mppo.trainer.value_gate import describe_end

    if run.reporter.is_main:
        exit_report.say(describe_end(gate, run.recipe, *run.last))
    return gate.holds


def _export(run: Run) -> None:
    """Export the actor, or the pretrained critic, as a Hugging Face folder, if all is done."""
    from mppo.trainer.run import exporting
    from mppo.trainer.run_folder import AVERAGE

    if run.recipe.trainer.export_hf and not run.checkpoints.stopped_early:
        with phase("export"), exporting(run.engine, run.roles):
            exported, folder = run.roles.exported, run.folder.path
            weights = exported.weights
            kept = [weights.save(folder / exported.name)]
            if weights.average is not None:
                kept.append(weights.save_average(folder / AVERAGE))
        for path in kept:
            if path is not None:
                run.reporter.line(f"kept {path}")
