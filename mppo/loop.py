"""One PPO iteration, on one screen: collect, score, measure, estimate, update, sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from mppo.batch import Batch, Experience, Trajectory
from mppo.collection import collect, generate, settle
from mppo.estimate import current_kl, estimate, normalize_scores
from mppo.experience_metrics import experience_metrics
from mppo.parallel.abandon import Abandoned
from mppo.parallel.first_rank import on_first_rank
from mppo.parallel.phase import phase
from mppo.replay import MODELS, Case, keep_case
from mppo.report.console import SampleRow
from mppo.report.history import Metrics
from mppo.rewards.division import ScoringError
from mppo.rewards.judgement import Judgement
from mppo.roles import NonFiniteStep
from mppo.rollout.engine import WeightSource
from mppo.run import Run
from mppo.safety.redact import redact
from mppo.score_metrics import show_errors, validation_metrics
from mppo.selection import resample
from mppo.step_metrics import longest_prompts, mismatch, performance


def train(run: Run) -> None:
    """All iterations, with validation before the first and every ``trainer.test_freq`` steps."""
    trainer = run.recipe.trainer
    done = run.checkpoints.resume(run.folder.found)
    run.folder.begin()
    on_first_rank(partial(run.reporter.start, done))
    sync(run, version=done)
    if trainer.val_before_train and not done:
        with suppress(Abandoned):  # the first step will be left as well
            run.reporter.log(0, validate(run, step=0))
        run.seconds.clear()
    for step in range(done + 1, run.total_steps + 1):
        run.checkpoints.before_step()
        try:
            with rescuing(run, step):
                metrics = iterate(run, step)
        except Abandoned as reason:
            with run.stage("save_checkpoint", step):
                run.checkpoints.leave(step, reason)
            break
        last = step == run.total_steps
        if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
            # left by request, the step is done all the same, and after_step stops the run
            with suppress(Abandoned), rescuing(run, step, metrics):
                metrics |= validate(run, step)
        run.reporter.log(step, metrics)
        run.seconds.clear()
        with run.stage("save_checkpoint", step):
            if run.checkpoints.after_step(step, last, metrics):
                break


@contextmanager
def rescuing(run: Run, step: int, metrics: Metrics | None = None) -> Iterator[None]:
    """Save what is done, should responses not be judged: the run ends, and can be resumed.

    ``metrics``: of the step, where it is done.
    """
    try:
        yield
    except ScoringError:
        if metrics is not None:
            run.reporter.log(step, metrics)
        with run.stage("save_checkpoint", step):
            run.checkpoints.rescue(step, metrics)
        raise


def iterate(run: Run, step: int) -> dict[str, float]:
    """One iteration; its metrics."""
    algorithm, actor_frozen = run.recipe.algorithm, step <= run.recipe.trainer.critic_warmup
    collected = collect(run, step)
    scored = collected.scored
    run.moments.merge(scored.scores_B)
    batch, baseline_B = normalize_scores(scored, collected.baseline_B, algorithm, run.moments)
    with run.stage("measure", step):
        measured = run.roles.measure(batch)
    with run.stage("adv", step):
        experience = estimate(measured, algorithm, run.kl.coef, baseline_scores_B=baseline_B)
        experience = resample(experience, algorithm, seed=run.recipe.trainer.seed + step)
    run.checkpoints.before_update()
    with run.stage("update", step), keeping_offender(run, experience, step):
        update_metrics = run.roles.update(experience, step, actor_frozen)
    waited = settle(run, step)
    with run.stage("update_weights", step):
        sync(run, version=step)
    show_samples(run, step, collected.trajectories, scored)
    kl = current_kl(measured, algorithm)
    metrics = collected.metrics | waited | experience_metrics(experience) | update_metrics
    metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": run.kl.coef}
    metrics |= {"critic/raw_score/mean": scored.scores_B.mean().item()}
    metrics |= run.engine.sync_metrics()
    metrics |= {"prompt_length/clip_ratio": longest_prompts(batch, run.recipe.data)}
    if run.recipe.actor.use_kl_loss:
        metrics["actor/kl_coef"] = run.recipe.actor.kl_loss_coef
    run.kl.update(kl, batch.num_sequences)
    return metrics | mismatch(measured, step) | performance(run, batch, step)


@contextmanager
def keeping_offender(run: Run, experience: Experience, step: int) -> Iterator[None]:
    """Keep the batch and the models of a step that was not finite, for ``mppo-replay``."""
    try:
        yield
    except NonFiniteStep as fault:
        folder = run.reporter.run_dir / "nonfinite" / f"step_{step}"
        model, recipe = str(run.roles.actor.spec.folder), redact(run.recipe.model_dump(mode="json"))
        keep_case(folder, Case(step, fault.mini_batch, model, recipe), experience)
        run.checkpoints.save_roles(folder / MODELS)
        raise RuntimeError(f"{fault}; kept for mppo-replay: {folder}") from fault


def sync(run: Run, version: int) -> None:
    """Bring the actor's weights to the rollout engine."""
    bucket_bytes = run.recipe.rollout.sync_bucket_mb << 20
    with phase("weight sync"):
        run.engine.wake()
        actor = run.roles.actor
        weights = WeightSource(lambda: actor.hf_weights(bucket_bytes), actor.slices)
        run.engine.update_weights(weights, version)


def validate(run: Run, step: int) -> dict[str, float]:
    """Scores on the held-out prompts, over all and by data source."""
    if not len(run.validation):
        return {}
    prompts = run.validation.prompts
    size = run.recipe.data.val_batch_size or len(prompts)
    trajectories: list[Trajectory] = []
    judged: list[Judgement] = []
    with run.stage("testing", step):
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            found = generate(run, part, run.recipe.rollout.validation, step=0)
            trajectories += found
            judged += run.scorer.score(found)
    show_errors(run.reporter, step, judged)
    timing = {"timing_s/testing": run.seconds["testing"]}
    return timing | validation_metrics(trajectories, judged)


def show_samples(run: Run, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
    """A table of completions at the start, in the middle and at the end of the run."""
    if step not in (1, (run.total_steps + 1) // 2, run.total_steps):
        return
    shown = trajectories[: run.recipe.trainer.sample_table_rows]
    texts = run.tokenizer.batch_decode(
        [list(t.response_ids) for t in shown], skip_special_tokens=True
    )
    rows = [
        SampleRow(t.prompt.text, text, t.prompt.ground_truth, float(reward))
        for t, text, reward in zip(shown, texts, batch.scores_B)
    ]
    run.reporter.samples(step, rows)
