"""The training loop: generate, score, compute log-probs, estimate, update, sync weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from mppo.batch.batch import Batch
from mppo.batch.episode import with_scores
from mppo.batch.outputs import Experience
from mppo.parallel.collectives import group_size
from mppo.parallel.measurement import probe_ms, profiling
from mppo.planning.residency import SAVE, WEIGHT_SYNC
from mppo.report.files import NONFINITE
from mppo.report.history import Metrics
from mppo.report.opening import layout_line
from mppo.rewards.division import ScoringError
from mppo.rollout.engine import WeightSource
from mppo.safety.redact import redact
from mppo.supervision import stop_request
from mppo.supervision.first_rank import on_first_rank
from mppo.supervision.phase import phase
from mppo.supervision.stop_request import StepInterrupted
from mppo.trainer.advantages import current_kl, estimate, normalize_scores
from mppo.trainer.batch_selection import resample_experience
from mppo.trainer.dump import dump_step, replay_rollout
from mppo.trainer.forward_phase import ForwardPhase
from mppo.trainer.generation.rollout_stage import (
    DynamicSampling,
    Rollout,
    go_on,
    pause,
    resume,
    roll_out,
    show_errors,
)
from mppo.trainer.metrics import (
    balance_metrics,
    batch_metrics,
    kl_metrics,
    performance_metrics,
    rank_metrics,
    staleness_metrics,
)
from mppo.trainer.run import Run
from mppo.trainer.run_folder import PROFILE
from mppo.trainer.update.case_replay import MODELS, ReplayCase, keep_case
from mppo.trainer.update.update_stage import NonFiniteStep, UpdatePhase
from mppo.trainer.validation.validation_metrics import validation_metrics
from mppo.trainer.validation.validation_stage import (
    generate_validation,
    sample_lines,
    show_samples,
    write_lines,
)


def train(run: Run) -> None:
    """Run all iterations; validate before the first and every ``trainer.test_freq`` steps."""
    trainer = run.recipe.trainer
    if run.folder.found is not None:
        run.roles.placement.enter(SAVE)
    done = run.checkpoints.resume(run.folder.found)
    run.folder.begin()
    run.last = (done, {})
    on_first_rank(partial(run.reporter.start, done))
    run.reporter.event("start", done, layout_line(run.recipe, group_size()))
    sync_weights(run, version=done)
    if trainer.val_before_train and not done:
        with suppress(StepInterrupted):  # the first step will be interrupted too
            run.reporter.log(0, validate(run, step=0))
        run.seconds.clear()
    if run.gate_holds:  # a value pretraining that had ended: its critic is exported again
        run.reporter.total_steps = done
        return run.checkpoints.finish()
    for step in range(done + 1, run.total_steps + 1):
        run.checkpoints.before_step()
        try:
            with rescuing(run, step), profiled(run, step):
                metrics = iterate(run, step)
        except StepInterrupted as reason:
            with run.stage("save_checkpoint", step):
                run.checkpoints.abandon_step(step, reason)
            break
        last = step == run.total_steps or run.gate_holds
        run.reporter.total_steps = step if last else run.total_steps
        if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
            # a stop request may interrupt validation, but the step is done: after_step ends the run
            with suppress(StepInterrupted), rescuing(run, step, metrics):
                metrics |= validate(run, step)
        run.reporter.log(step, metrics)
        run.last = (step, metrics)
        run.callbacks.on_step(step, metrics)
        run.seconds.clear()
        with run.stage("save_checkpoint", step):
            if run.checkpoints.after_step(step, last, metrics) or last:
                break


def profiled(run: Run, step: int) -> AbstractContextManager[None]:
    """The context in which a step is profiled, if ``trainer.profile`` names it and this rank."""
    profile, rank = run.recipe.trainer.profile, dist.get_rank()
    if step not in profile.steps or rank not in profile.ranks:
        return nullcontext()
    return profiling(run.reporter.run_dir / PROFILE, step, rank)


@contextmanager
def rescuing(run: Run, step: int, metrics: Metrics | None = None) -> Iterator[None]:
    """Save a checkpoint if scoring fails inside: the run ends and can be resumed. ``metrics`` are
    of the step, if it is done; None: the checkpoint is of the step before."""
    try:
        yield
    except ScoringError:
        if metrics is not None:
            run.reporter.log(step, metrics)
        with run.stage("save_checkpoint", step):
            run.checkpoints.rescue(step, metrics)
        raise


def iterate(run: Run, step: int) -> dict[str, float]:
    """Run one iteration and return its metrics. At every ``stop_request.sync`` all ranks interrupt
    the step if a stop is due (StepInterrupted); the rollout engine contains one more, while it
    waits for responses. ScoringError: a response could not be scored."""
    recipe, algorithm = run.recipe, run.recipe.algorithm
    rollout, sampling_metrics = collect_rollout(run, step)
    run.callbacks.on_batch(rollout.batch)
    run.reward_stats.merge(rollout.batch.scores_B[rollout.batch.episodes.last_E])
    batch, baseline_B = normalize_scores(
        rollout.batch, rollout.baseline_B, algorithm, run.reward_stats
    )
    with run.stage("log_probs", step):
        forward = ForwardPhase(run.roles, batch)
        for roles in forward.passes:
            forward.compute(roles)
            stop_request.sync()
        outputs = forward.outputs()
    with run.stage("adv", step):
        run.roles.placement.prepare("update")
        experience = estimate(outputs, algorithm, run.kl.coef, baseline_scores_B=baseline_B)
    if recipe.trainer.dump_rollouts:
        with run.stage("dump_rollouts", step):
            dump_step(run, step, rollout, outputs, experience)
    if algorithm.use_pf_ppo:
        with run.stage("adv", step):
            seed = recipe.trainer.seed + step
            experience = resample_experience(experience, algorithm.pf_ppo, seed)
    run.checkpoints.before_update()
    with run.stage("update", step), keeping_nonfinite_step(run, experience, step):
        actor_frozen = step <= recipe.trainer.critic_warmup
        gate = run.roles.gate
        held_out = gate is not None and gate.holds_out(step)
        update = UpdatePhase(run.roles, experience, step, actor_frozen, critic_frozen=held_out)
        update.run()
        update_metrics = update.metrics()
    ahead_metrics = pause(run, step)
    with run.stage("update_weights", step):
        sync_weights(run, version=step)
    resume(run, step)
    show_samples(run, step, rollout.episodes)
    kl = current_kl(outputs, algorithm)
    metrics = sampling_metrics | ahead_metrics | update_metrics
    metrics |= batch_metrics(rollout.batch, outputs, experience, step, recipe)
    metrics |= {} if gate is None else gate.judge(step, metrics)
    metrics |= staleness_metrics(rollout.episodes, step, recipe.rollout.max_staleness)
    metrics |= kl_metrics(kl, run.kl.coef, recipe.actor) | run.engine.sync_metrics()
    run.kl.update(kl, batch.num_sequences)
    return metrics | run_metrics(run, batch, step)


def collect_rollout(run: Run, step: int) -> tuple[Rollout, dict[str, float]]:
    """Generate and score responses, or read those of a dump (``trainer.replay``)."""
    if run.recipe.trainer.replay is not None:
        with run.stage("replay", step):
            return replay_rollout(run, step)
    sampling = DynamicSampling(run.recipe)
    while sampling.needs_more:
        sampling.add(roll_out(run, step, last=sampling.is_last))
    if sampling.ended_early:
        with run.stage("gen", step):
            go_on(run, step)
    return sampling.result()


@contextmanager
def keeping_nonfinite_step(run: Run, experience: Experience, step: int) -> Iterator[None]:
    """Save batch and models of a non-finite step for ``mppo-replay``; a RuntimeError with the
    folder replaces ``NonFiniteStep``."""
    try:
        yield
    except NonFiniteStep as error:
        folder = run.reporter.run_dir / NONFINITE / f"step_{step}"
        model, recipe = str(run.roles.actor.folder), redact(run.recipe.model_dump(mode="json"))
        case = ReplayCase(step, error.mini_batch, model, recipe, group_size())
        keep_case(folder, case, experience)
        run.checkpoints.save_roles(folder / MODELS)
        raise RuntimeError(f"{error}; kept for mppo-replay: {folder}") from error


def run_metrics(run: Run, batch: Batch, step: int) -> dict[str, float]:
    roles, optimizer = run.roles, run.roles.exported.optimizer
    assert optimizer is not None, "it learns"
    metrics = performance_metrics(batch, step, run.seconds, roles.seconds)
    metrics |= balance_metrics(batch.lengths_B.tolist(), roles.actor.layout.dp)
    metrics |= rank_metrics(probe_ms())
    return metrics | {
        "lr": optimizer.learning_rate,
        "training/epoch": run.prompts.epoch,
        "training/skipped_steps": float(roles.skipped_steps),
        "perf/offload_host_memory_gb": roles.placement.host_nbytes / 2**30,
    }


def sync_weights(run: Run, version: int) -> None:
    """Send the actor's weights to the rollout engine as ``version``."""
    bucket_bytes = run.recipe.rollout.sync_bucket_mb << 20
    with phase("weight sync"):
        actor = run.roles.actor
        placement = run.roles.placement
        weights = WeightSource(
            lambda: actor.weights.stream(bucket_bytes),
            actor.weights.slices,
            placement.sending_weights,
        )
        placement.enter(WEIGHT_SYNC)  # the engine needs memory before it takes the weights
        run.engine.update_weights(weights, version)


def validate(run: Run, step: int) -> dict[str, float]:
    """Score responses to the validation prompts; metrics overall and by data source. A replay has
    no engine, and so no validation."""
    if not len(run.validation) or run.recipe.trainer.replay is not None:
        return {}
    folder = run.recipe.trainer.validation_data_dir
    with run.stage("testing", step):
        episodes = generate_validation(run.engine, run.recipe, run.validation.prompts)
        episodes = with_scores(episodes, run.scorer.score(episodes))
        if folder is not None:
            lines = sample_lines(episodes, run.tokenizer)
            on_first_rank(partial(write_lines, Path(folder) / f"{step}.jsonl", lines))
    show_errors(run.reporter, step, episodes)
    timing = {"timing_s/testing": run.seconds["testing"]}
    return timing | validation_metrics(episodes)
