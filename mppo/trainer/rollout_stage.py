"""The rollout stage: generating responses to a batch of prompts, and scoring them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.batch.batch import Batch
from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.config.schema import Recipe
from mppo.config.sections.rollout import SamplingConfig
from mppo.report.reporter import Reporter
from mppo.rewards.early import EarlyScores
from mppo.rewards.scores import UNSCORED, ResponseScore
from mppo.rollout.engine import GenerationRequest, sampling_seed
from mppo.trainer.advantages import needs_greedy_baseline
from mppo.trainer.metrics import conversation_metrics, errors_of, reward_metrics, unscored
from mppo.trainer.run import PendingRollout, Run
from mppo.trainer.selection import (
    concatenate_batches,
    first_groups,
    informative_sequences,
    select_batch,
)
from mppo.trainer.sharing.shares import pack_at_home, share_out


@dataclass(frozen=True)
class UnscoredRollout:
    """Responses to one batch of prompts, before they are scored.

    Args:
        episodes: ``rollout.n`` for each prompt.
        keys: key of each response in ``early``.
        early: scoring of responses that arrived while others were still being generated.
        greedy: a greedy response to each prompt if the estimator needs its score, else empty.
    """

    episodes: list[Episode]
    keys: list[int]
    early: EarlyScores
    greedy: list[Episode]


@dataclass(frozen=True)
class ScoredRollout:
    """Responses with their scores.

    Args:
        episodes: the responses.
        batch: the packed responses with their scores.
        baseline_B: score of a greedy response to each sequence's prompt; empty without one.
        judged: the reward function's judgement of each response.
        judged_greedy: judgements of the greedy responses.
    """

    episodes: list[Episode]
    batch: Batch
    baseline_B: Tensor
    judged: list[ResponseScore]
    judged_greedy: list[ResponseScore]


class DynamicSampling:
    """Collects scored batches until an iteration has enough groups to train on.

    One batch is enough unless ``algorithm.filter_groups`` is enabled (DAPO, arXiv 2503.14476). Then
    batches are collected until as many groups as a batch has prompts have scores that differ, up to
    ``max_num_gen_batches``.

    Args:
        recipe: the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._filter, self._size = recipe.algorithm.filter_groups, recipe.data.train_batch_size
        self._n, self._has_agent = recipe.rollout.n, recipe.rollout.agent is not None
        self._batches_left = self._filter.max_num_gen_batches if self._filter.enable else 1
        self._found: list[ScoredRollout] = []
        self._informative = 0

    @property
    def needs_more(self) -> bool:
        """Whether another batch must be generated."""
        return self._batches_left > 0 and self._informative < self._size

    @property
    def is_last(self) -> bool:
        """Whether the batch generated next is the last one allowed."""
        return self._batches_left == 1

    @property
    def ended_early(self) -> bool:
        """Whether fewer batches than allowed were enough."""
        return self._batches_left > 0

    def add(self, scored: ScoredRollout) -> None:
        """Add a scored batch."""
        self._batches_left -= 1
        self._found.append(scored)
        groups = informative_sequences(scored.batch.scores_B, scored.batch.group_B)
        self._informative += len(groups) // self._n

    def result(self) -> tuple[ScoredRollout, dict[str, float]]:
        """Return the data to train on and its metrics.

        The data is the one batch, or with ``filter_groups`` the groups whose scores differ.
        """
        everything = _joined(self._found)
        episodes = everything.episodes
        metrics = reward_metrics(episodes, everything.judged, everything.judged_greedy)
        if self._has_agent:
            metrics |= conversation_metrics(episodes)
        if not self._filter.enable:
            return everything, metrics
        batch = everything.batch
        chosen = first_groups(batch.scores_B, batch.group_B, self._size)
        places = chosen.tolist()
        kept = ScoredRollout(
            [episodes[i] for i in places],
            select_batch(batch, chosen),
            everything.baseline_B[chosen] if len(everything.baseline_B) else everything.baseline_B,
            [everything.judged[i] for i in places],
            everything.judged_greedy,
        )
        return kept, metrics | {
            "train/num_gen_batches": float(len(self._found)),
            "train/informative_groups": self._informative / (len(self._found) * self._size),
        }


def _joined(parts: Sequence[ScoredRollout]) -> ScoredRollout:
    """Concatenate scored batches."""
    return ScoredRollout(
        [episode for part in parts for episode in part.episodes],
        concatenate_batches([part.batch for part in parts]),
        torch.cat([part.baseline_B for part in parts]),
        [judgement for part in parts for judgement in part.judged],
        [judgement for part in parts for judgement in part.judged_greedy],
    )


def generate_batch(run: Run, step: int, last: bool) -> UnscoredRollout:
    """Generate responses to the next batch of prompts.

    Args:
        run: the run.
        step: the PPO step.
        last: whether this is the step's last batch; the next step's rollout then starts.
    """
    pending, run.ahead = run.ahead or submit(run, step), None
    prompts, keys, episodes = collect(run, pending)
    greedy: list[Episode] = []
    if needs_greedy_baseline(run.recipe.algorithm):
        greedy = generate(run, prompts, run.recipe.rollout.greedy, step)
    if last:
        prefetch_next(run, step)
    return UnscoredRollout(episodes, keys, pending.early, greedy)


def score(run: Run, rollout: UnscoredRollout, step: int) -> ScoredRollout:
    """Score responses. Collective."""
    episodes = rollout.episodes
    judged = rollout.early.finish(rollout.keys, episodes)
    batch = pack_scored(run, episodes, judged)
    judged_greedy = run.scorer.score(rollout.greedy)
    show_errors(run.reporter, step, judged + judged_greedy)
    baseline_B = torch.tensor([judgement.score for judgement in judged_greedy])
    baseline_B = baseline_B.repeat_interleave(run.recipe.rollout.n)
    return ScoredRollout(episodes, batch, baseline_B, judged, judged_greedy)


def pack_scored(run: Run, episodes: list[Episode], judged: Sequence[ResponseScore]) -> Batch:
    """Pack scored responses and share them out. Collective."""
    # as in TRL, a response of maximal length has no end slot
    end_slots_below = 0
    if run.recipe.algorithm.score_after_end:
        end_slots_below = run.recipe.data.max_response_length
    scores = [judgement.score for judgement in judged]
    token_rewards = [judgement.token_rewards for judgement in judged]
    packed = pack_at_home(episodes, scores, end_slots_below, token_rewards)
    return share_out(packed, run.roles.actor.config.num_moe_experts)


def submit(run: Run, step: int) -> PendingRollout:
    """Start generating and scoring responses to the next prompts.

    The prompts are consumed only when their responses are collected: a checkpoint saved earlier
    does not count them, and holds the responses that have arrived.
    """
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    prompts = run.prompts.peek(size + math.ceil(rollout.over_sampling * size))
    needed = size if len(prompts) > size else None
    early, limit = EarlyScores(run.scorer), run.recipe.data.max_response_length
    seed = sampling_seed(run.recipe.trainer.seed, step)
    request = GenerationRequest(
        prompts, rollout, limit, seed, early.take, needed, run.checkpoints.partial
    )
    return PendingRollout(prompts, run.engine.submit(request), early)


def collect(run: Run, pending: PendingRollout) -> tuple[list[Prompt], list[int], list[Episode]]:
    """Wait for the responses of a submitted rollout.

    If more prompts were submitted than a batch holds, the prompts without all their responses
    return to the prompt loader for a later batch.

    Returns:
        The answered prompts, each response's key in ``pending.early``, and the responses.
    """
    n, episodes = run.recipe.rollout.n, pending.generation.collect()
    run.checkpoints.partial = pending.generation.left_over
    prompts = run.prompts.take(len(pending.prompts))
    assert prompts == pending.prompts
    place = {prompt.uid: index for index, prompt in enumerate(prompts)}
    uids = [each.prompt.uid for each in episodes]
    keys = [place[uid] * n + i % n for i, uid in enumerate(uids)]
    answered = set(uids)
    run.prompts.give_back([prompt for prompt in prompts if prompt.uid not in answered])
    return [prompt for prompt in prompts if prompt.uid in answered], keys, episodes


def prefetch_next(run: Run, step: int) -> None:
    """Start the next step's rollout, or free the engine's memory for training."""
    if run.recipe.trainer.rollout_ahead and step < run.total_steps:
        run.ahead = submit(run, step + 1)
    else:
        run.engine.sleep()
        run.roles.placement.prepare("reward", "forward")


def wait_for_prefetch(run: Run, step: int) -> dict[str, float]:
    """Wait for the next step's responses before the weights change; return how long they took."""
    if run.ahead is None:
        return {}
    with run.stage("wait_prev_gen", step):
        run.ahead.generation.wait()
    run.checkpoints.partial = run.ahead.generation.left_over
    return {"timing_s/gen_ahead": run.ahead.generation.seconds}


def generate(
    run: Run, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int
) -> list[Episode]:
    """Generate responses to the prompts."""
    limit = run.recipe.data.max_response_length
    seed = sampling_seed(run.recipe.trainer.seed, step)
    return run.engine.generate(GenerationRequest(prompts, sampling, limit, seed))


def show_errors(reporter: Reporter, step: int, judgements: Sequence[ResponseScore]) -> None:
    """Report how many responses could not be scored, with the first error, and how many score 0.

    One line for errors, and one for each reason in ``UNSCORED`` for which responses score 0.
    """
    answers = [each for each in judgements if each.error is None]
    for reason, count in unscored(answers).items():
        if count:
            text = f"{count:.0f} of {len(judgements)} responses {UNSCORED[reason]} and score 0"
            reporter.line(f"step {step}: {text}")
    errors = errors_of(judgements)
    if errors:
        text = f"{len(errors)} of {len(judgements)} responses have no score and get reward.on_error"
        reporter.line(f"step {step}: {text}; the first error: {errors[0]}")
