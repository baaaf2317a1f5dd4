"""One PPO iteration, on one screen: collect, score, measure, estimate, update, sync."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.algos.kl_controller import KLController
from mppo.algos.masked import sequence_sum
from mppo.algos.reward_normalization import RunningMoments
from mppo.batch import Batch, Experience, Measured, Prompt, Trajectory, pack_trajectories
from mppo.checkpoint.checkpointer import Checkpointer
from mppo.config.schema import DataConfig, Recipe, SamplingConfig
from mppo.data.loader import PromptLoader
from mppo.data.source import PromptSet
from mppo.estimate import current_kl, estimate, needs_greedy_baseline, normalize_scores
from mppo.experience_metrics import experience_metrics
from mppo.parallel import device
from mppo.parallel.abandon import Abandoned, meet
from mppo.parallel.balance import balance_metrics
from mppo.parallel.phase import phase
from mppo.replay import MODELS, Case, keep_case
from mppo.report.redact import redact
from mppo.report.reporter import Reporter, SampleRow
from mppo.rewards.early import EarlyScores
from mppo.rewards.scorer import Scorer
from mppo.roles import NonFiniteGradient, Roles
from mppo.rollout.engine import Finished, RolloutEngine, WeightSource
from mppo.selection import (
    concatenate_batches,
    first_groups,
    informative_sequences,
    resample,
    select_batch,
)

GREEDY = SamplingConfig(temperature=0.0)


@dataclass(frozen=True)
class Collected:
    """What an iteration learns from.

    Args:
        trajectories: of all sequences.
        scored: the same with their scores, as one batch.
        baseline_B: score of a greedy response to each sequence's prompt; empty unless asked for.
        metrics: of the collection.
    """

    trajectories: list[Trajectory]
    scored: Batch
    baseline_B: Tensor
    metrics: dict[str, float]


@dataclass
class Run:
    """Everything an iteration works with, and how long its stages took."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptLoader
    validation: PromptSet
    engine: RolloutEngine
    scorer: Scorer
    roles: Roles
    kl: KLController
    moments: RunningMoments
    checkpoints: Checkpointer
    reporter: Reporter
    total_steps: int
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time a stage, and name it should it fail."""
        start = time.perf_counter()
        with phase(name, step):
            yield
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train(run: Run) -> None:
    """All iterations, with validation before the first and every ``trainer.test_freq`` steps."""
    trainer = run.recipe.trainer
    done = run.checkpoints.resume()
    sync(run, version=done)
    if trainer.val_before_train and not done:
        with suppress(Abandoned):
            run.reporter.log(0, validate(run, step=0))
    for step in range(done + 1, run.total_steps + 1):
        run.checkpoints.before_step()
        try:
            metrics = iterate(run, step)
        except Abandoned as reason:
            with run.stage("save_checkpoint", step):
                run.checkpoints.leave(step, reason)
            break
        last = step == run.total_steps
        if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
            with suppress(Abandoned):
                metrics |= validate(run, step)
        run.reporter.log(step, metrics)
        run.seconds.clear()
        with run.stage("save_checkpoint", step):
            if run.checkpoints.after_step(step, last, metrics):
                break


def iterate(run: Run, step: int) -> dict[str, float]:
    """One iteration; its metrics."""
    algorithm, actor_frozen = run.recipe.algorithm, step <= run.recipe.trainer.critic_warmup
    collected = collect(run, step)
    scored, baseline_B = collected.scored, collected.baseline_B
    run.moments.merge(scored.scores_B)
    batch = normalize_scores(scored, algorithm, run.moments)
    with run.stage("measure", step):
        measured = run.roles.measure(batch)
    with run.stage("adv", step):
        experience = estimate(measured, algorithm, run.kl.coef, baseline_scores_B=baseline_B)
        experience = resample(experience, algorithm, seed=run.recipe.trainer.seed + step)
    with run.stage("update", step), keeping_offender(run, experience, step):
        update_metrics = run.roles.update(experience, step, actor_frozen)
    with run.stage("update_weights", step):
        sync(run, version=step)
    show_samples(run, step, collected.trajectories, scored)
    kl = current_kl(measured, algorithm)
    metrics = collected.metrics | experience_metrics(experience) | update_metrics
    metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": run.kl.coef}
    metrics |= {"critic/raw_score/mean": scored.scores_B.mean().item()}
    metrics |= {"prompt_length/clip_ratio": longest_prompts(batch, run.recipe.data)}
    if run.recipe.actor.use_kl_loss:
        metrics["actor/kl_coef"] = run.recipe.actor.kl_loss_coef
    run.kl.update(kl, batch.num_sequences)
    return metrics | mismatch(measured, step) | performance(run, batch, step)


def collect(run: Run, step: int) -> Collected:
    """Scored responses to a batch of prompts.

    With ``algorithm.filter_groups``, generation goes on until as many groups as the batch has
    prompts differ in score, or its maximum is reached (DAPO's dynamic sampling).
    """
    algorithm, size = run.recipe.algorithm, run.recipe.data.train_batch_size
    dynamic = algorithm.filter_groups
    left = dynamic.max_num_gen_batches if dynamic.enable else 1
    trajectories: list[Trajectory] = []
    greedy: list[Trajectory] = []
    batches: list[Batch] = []
    informative = 0
    while left and informative < size:
        left -= 1
        early = EarlyScores(run.scorer)
        with run.stage("gen", step):
            prompts, keys, found = ask(run, step, early.take)
            if needs_greedy_baseline(algorithm):
                greedy = generate(run, prompts, GREEDY, step)
            if not left:
                run.engine.sleep()
        with run.stage("reward", step):
            trajectories += found
            scores = early.finish(keys, found)
            batches.append(pack_trajectories(found, scores, algorithm.score_after_end))
            baseline_B = torch.tensor(run.scorer.score(greedy))
            meet()
        groups = informative_sequences(batches[-1].scores_B, batches[-1].group_B)
        informative += len(groups) // run.recipe.rollout.n
    scored, n = concatenate_batches(batches), run.recipe.rollout.n
    if not dynamic.enable:
        return Collected(trajectories, scored, baseline_B.repeat_interleave(n), {})
    if left:
        run.engine.sleep()
    chosen = first_groups(scored.scores_B, scored.group_B, size)
    metrics = {
        "train/num_gen_batches": float(len(batches)),
        "train/informative_groups": informative / (len(batches) * size),
    }
    kept = [trajectories[i] for i in chosen.tolist()]
    return Collected(kept, select_batch(scored, chosen), baseline_B, metrics)


def ask(
    run: Run, step: int, finished: Finished
) -> tuple[list[Prompt], list[int], list[Trajectory]]:
    """A batch of responses: their prompts, the keys ``finished`` knows them by, and themselves.

    Where more prompts are asked than a batch holds, those not answered in time come again.
    """
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    asked = run.prompts.take(size + math.ceil(rollout.over_sampling * size))
    wanted = size if len(asked) > size else None
    trajectories = generate(run, asked, rollout, step, finished, wanted)
    place = {prompt.uid: index for index, prompt in enumerate(asked)}
    keys = [place[t.prompt.uid] * rollout.n + i % rollout.n for i, t in enumerate(trajectories)]
    answered = {t.prompt.uid for t in trajectories}
    run.prompts.give_back([prompt for prompt in asked if prompt.uid not in answered])
    return [prompt for prompt in asked if prompt.uid in answered], keys, trajectories


@contextmanager
def keeping_offender(run: Run, experience: Experience, step: int) -> Iterator[None]:
    """Keep the batch and the models of a step that was not finite, for ``mppo-replay``."""
    try:
        yield
    except NonFiniteGradient as fault:
        folder = run.reporter.run_dir / "nonfinite" / f"step_{step}"
        model, recipe = str(run.roles.actor.spec.folder), redact(run.recipe.model_dump(mode="json"))
        keep_case(folder, Case(step, fault.mini_batch, model, recipe), experience)
        run.checkpoints.save_roles(folder / MODELS)
        raise RuntimeError(f"{fault}; kept for mppo-replay: {folder}") from fault


def generate(
    run: Run,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    seed: int,
    finished: Finished | None = None,
    wanted: int | None = None,
) -> list[Trajectory]:
    """Sampled responses to the prompts, or to the first ``wanted`` of them to be answered."""
    limit, seed = run.recipe.data.max_response_length, run.recipe.trainer.seed * 1_000_003 + seed
    return run.engine.generate(prompts, sampling, limit, seed, finished, wanted)


def sync(run: Run, version: int) -> None:
    """Bring the actor's weights to the rollout engine."""
    bucket_bytes = run.recipe.rollout.sync_bucket_mb << 20
    with phase("weight sync"):
        run.engine.wake()
        weights = WeightSource(lambda: run.roles.actor.hf_weights(bucket_bytes))
        run.engine.update_weights(weights, version)


def validate(run: Run, step: int) -> dict[str, float]:
    """Mean score on the held-out prompts, over all and by data source."""
    if not len(run.validation):
        return {}
    prompts = run.validation.prompts
    size = run.recipe.data.val_batch_size or len(prompts)
    by_source: dict[str, list[float]] = {}
    with run.stage("testing", step):
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            trajectories = generate(run, part, run.recipe.rollout.val_kwargs, seed=0)
            for trajectory, reward in zip(trajectories, run.scorer.score(trajectories)):
                by_source.setdefault(trajectory.prompt.data_source, []).append(reward)
    metrics = {f"val-core/{k}/reward/mean": sum(v) / len(v) for k, v in by_source.items()}
    everything = [reward for rewards in by_source.values() for reward in rewards]
    return metrics | {"val/reward": sum(everything) / len(everything)}


def show_samples(run: Run, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
    """A table of completions at the start, in the middle and at the end of the run."""
    if step not in (1, (run.total_steps + 1) // 2, run.total_steps):
        return
    count = min(run.recipe.trainer.sample_table_rows, len(trajectories))
    texts = run.tokenizer.batch_decode(
        [list(t.response_ids) for t in trajectories[:count]], skip_special_tokens=True
    )
    rows = [
        SampleRow(prompt=t.prompt.text, response=text, score=float(reward))
        for t, text, reward in zip(trajectories, texts, batch.scores_B)
    ]
    run.reporter.samples(step, rows)


def mismatch(measured: Measured, step: int) -> dict[str, float]:
    """How far the engine's probabilities are from the actor's, and its weights behind, over
    response tokens."""
    batch = measured.batch
    inside = batch.response_mask_T > 0
    gap = (measured.logprobs_T - batch.rollout_logprobs_T)[inside].abs()
    if not len(gap):
        return {}
    lag = step - 1 - batch.weight_version_T[inside]
    return {
        "training/rollout_logprob_diff_mean": gap.mean().item(),
        "training/rollout_logprob_diff_max": gap.max().item(),
        "training/weight_version_lag_max": float(lag.max()),
        "training/weight_version_lag_mean": float(lag.double().mean()),
    }


def longest_prompts(batch: Batch, data: DataConfig) -> float:
    """Share of the prompts that have ``data.max_prompt_length`` tokens."""
    prompt_B = batch.lengths_B - sequence_sum(batch.value_mask_T, batch.cu_seqlens)
    return (prompt_B >= data.max_prompt_length).float().mean().item()


def performance(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Seconds by stage, tokens per second, memory."""
    seconds = sum(run.seconds.values())
    tokens, lengths = len(batch.tokens_T), batch.lengths_B.tolist()
    responses = max(float(batch.response_mask_T.sum()), 1.0)
    per_token = {"gen": responses}
    timed = run.seconds | run.roles.seconds
    metrics = {f"timing_s/{name}": value for name, value in timed.items()}
    metrics |= {
        f"timing_per_token_ms/{name}": 1e3 * value / per_token.get(name, tokens)
        for name, value in timed.items()
    }
    metrics |= balance_metrics(lengths, run.roles.actor.layout.dp)
    return metrics | {
        "episode": float(step * batch.num_sequences),
        "eps": batch.num_sequences / seconds,
        "lr": run.roles.actor.optimizer.learning_rate,
        "timing_s/step": seconds,
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / torch.distributed.get_world_size(),
        "perf/tokens_per_second": tokens / seconds,
        "perf/max_memory_allocated_gb": device.peak_memory_bytes() / 2**30,
        "perf/max_memory_reserved_gb": device.peak_reserved_bytes() / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
        "training/global_step": float(step),
        "training/epoch": run.prompts.epoch,
        "training/skipped_steps": float(run.roles.skipped_steps),
    }
