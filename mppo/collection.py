"""Collecting what an iteration learns from: responses to a batch of prompts, and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.batch import Batch, Prompt, Trajectory, pack_trajectories
from mppo.config.schema import SamplingConfig
from mppo.estimate import needs_greedy_baseline
from mppo.parallel.abandon import meet
from mppo.rewards.early import EarlyScores
from mppo.rewards.judgement import Judgement
from mppo.rollout.engine import Wish
from mppo.run import Asked, Run
from mppo.score_metrics import show_errors, training_metrics
from mppo.selection import concatenate_batches, first_groups, informative_sequences, select_batch


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


def collect(run: Run, step: int) -> Collected:
    """Scored responses to a batch of prompts.

    With ``algorithm.filter_groups``, generation goes on until as many groups as the batch has
    prompts differ in score, or its maximum is reached (DAPO's dynamic sampling). With
    ``trainer.rollout_ahead`` the first batch was asked in the step before, and the next step's is
    asked before the models are busy.
    """
    algorithm, size = run.recipe.algorithm, run.recipe.data.train_batch_size
    dynamic = algorithm.filter_groups
    # as in TRL, a stop token in the last place of a response has no slot behind it
    end_slots_below = run.recipe.data.max_response_length if algorithm.score_after_end else 0
    left = dynamic.max_num_gen_batches if dynamic.enable else 1
    trajectories: list[Trajectory] = []
    greedy: list[Trajectory] = []
    batches: list[Batch] = []
    judged: list[Judgement] = []
    judged_greedy: list[Judgement] = []
    informative = 0
    while left and informative < size:
        left -= 1
        with run.stage("gen", step):
            asked, run.ahead = run.ahead or ask(run, step), None
            prompts, keys, found = answers(run, asked)
            if needs_greedy_baseline(algorithm):
                greedy = generate(run, prompts, run.recipe.rollout.greedy, step)
            if not left:
                look_ahead(run, step)
        with run.stage("reward", step):
            just_judged = asked.early.finish(keys, found)
            scores = [judgement.score for judgement in just_judged]
            batches.append(pack_trajectories(found, scores, end_slots_below))
            trajectories += found
            judged += just_judged
            judged_greedy = run.scorer.score(greedy)
            baseline_B = torch.tensor([judgement.score for judgement in judged_greedy])
            meet()
        groups = informative_sequences(batches[-1].scores_B, batches[-1].group_B)
        informative += len(groups) // run.recipe.rollout.n
    scored, n = concatenate_batches(batches), run.recipe.rollout.n
    show_errors(run.reporter, step, judged + judged_greedy)
    metrics = training_metrics(trajectories, judged, judged_greedy)
    if not dynamic.enable:
        return Collected(trajectories, scored, baseline_B.repeat_interleave(n), metrics)
    if left:
        with run.stage("gen", step):
            look_ahead(run, step)
    chosen = first_groups(scored.scores_B, scored.group_B, size)
    metrics |= {
        "train/num_gen_batches": float(len(batches)),
        "train/informative_groups": informative / (len(batches) * size),
    }
    kept = [trajectories[i] for i in chosen.tolist()]
    return Collected(kept, select_batch(scored, chosen), baseline_B, metrics)


def ask(run: Run, step: int) -> Asked:
    """Begin to have a batch of prompts answered, and the responses scored.

    The prompts are taken when they are answered: a checkpoint saved before does not count them, and
    holds the responses that are there.
    """
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    prompts = run.prompts.peek(size + math.ceil(rollout.over_sampling * size))
    wanted = size if len(prompts) > size else None
    early, limit = EarlyScores(run.scorer), run.recipe.data.max_response_length
    seed = sampling_seed(run, step)
    wish = Wish(prompts, rollout, limit, seed, early.take, wanted, run.checkpoints.begun)
    return Asked(prompts, run.engine.begin(wish), early)


def answers(run: Run, asked: Asked) -> tuple[list[Prompt], list[int], list[Trajectory]]:
    """What was asked: the prompts, the keys by which the scores know the responses, and these.

    Where more prompts were asked than a batch holds, those not answered in time come again.
    """
    n, trajectories = run.recipe.rollout.n, asked.responses.result()
    prompts = run.prompts.take(len(asked.prompts))
    assert prompts == asked.prompts
    place = {prompt.uid: index for index, prompt in enumerate(prompts)}
    keys = [place[t.prompt.uid] * n + i % n for i, t in enumerate(trajectories)]
    answered = {t.prompt.uid for t in trajectories}
    run.prompts.give_back([prompt for prompt in prompts if prompt.uid not in answered])
    return [prompt for prompt in prompts if prompt.uid in answered], keys, trajectories


def look_ahead(run: Run, step: int) -> None:
    """All of a step is generated: go on with the next one's, or give the memory to training."""
    if run.recipe.trainer.rollout_ahead and step < run.total_steps:
        run.ahead = ask(run, step + 1)
    else:
        run.engine.sleep()


def settle(run: Run, step: int) -> dict[str, float]:
    """Wait for what is generated ahead, which new weights must not reach; how long it took."""
    if run.ahead is None:
        return {}
    with run.stage("wait_prev_gen", step):
        run.ahead.responses.settle()
    return {"timing_s/gen_ahead": run.ahead.responses.seconds}


def generate(
    run: Run, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int
) -> list[Trajectory]:
    """Sampled responses to the prompts."""
    limit = run.recipe.data.max_response_length
    return run.engine.generate(Wish(prompts, sampling, limit, sampling_seed(run, step)))


def sampling_seed(run: Run, step: int) -> int:
    """Another one for every step."""
    return run.recipe.trainer.seed * 1_000_003 + step
