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
from mppo.rollout.engine import Finished
from mppo.run import Run
from mppo.selection import concatenate_batches, first_groups, informative_sequences, select_batch

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
