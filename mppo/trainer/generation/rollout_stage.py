"""The rollout stage: which prompts are being answered, and the scored answers that make a batch.

Prompts are answered in the order of the data, and a batch takes the oldest complete ones. With
``rollout.max_staleness`` k > 0, what a batch leaves unfinished goes on with the next weights, and
disaggregated servers also generate during training. Then k * B prompts are being answered while a
batch of B is trained on, and B more once its weights are there; since a batch takes the oldest, no
token is more than k updates old. Tokens that would be older are generated again (AReaL,
arXiv 2505.24298, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.batch.batch import Batch
from mppo.batch.episode import Episode, with_scores
from mppo.batch.prompt import Prompt
from mppo.batch.selection import concatenate_batches, select_batch
from mppo.batch.shares import pack_at_home, share_out
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.report.reporter import Reporter
from mppo.rewards.scores import UNSCORED
from mppo.rollout.engine import GenerationRequest, sampling_seed
from mppo.safety.input_error import InputError
from mppo.supervision import stop_request
from mppo.trainer.advantages import needs_greedy_baseline
from mppo.trainer.batch_selection import first_groups, informative_sequences
from mppo.trainer.metrics import conversation_metrics, errors_of, reward_metrics, unscored
from mppo.trainer.run import PendingRollout, Run


def submit(run: Run, step: int, updates: int) -> PendingRollout:
    """Start generating and scoring responses to the prompts of a step and of those after it. The
    prompts are consumed only when their responses are collected: a checkpoint saved earlier does
    not count them, and holds the responses that have arrived. ``updates`` counts those of the
    weights until ``step``, which trains on the first batch."""
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    choice, count = _counts(run, step, updates)
    prompts = run.prompts.peek(count)
    keys = [each.uid * rollout.n + sample for each in prompts for sample in range(rollout.n)]

    def take(places: Sequence[int], episodes: Sequence[Episode]) -> None:
        run.early.take([keys[place] for place in places], episodes)

    request = GenerationRequest(
        prompts,
        rollout,
        run.recipe.data.max_response_length,
        sampling_seed(run.recipe.trainer.seed, step),
        take,
        num_prompts_needed=size if count > size or rollout.max_staleness else None,
        among=choice if rollout.generates_ahead else None,
        resumable=run.checkpoints.partial,
        oldest_version=step - 1 - rollout.max_staleness,
    )
    if rollout.agent is None or not rollout.max_staleness:
        ended = {place for place, each in request.resumed().items() if not each.is_unfinished}
        run.early.forget([key for place, key in enumerate(keys) if place not in ended])
    # else the episodes go on, or wait with their scores; one that starts again is scored again
    return PendingRollout(prompts, run.engine.submit(request))


def _counts(run: Run, step: int, updates: int) -> tuple[int, int]:
    """Prompts among which the batch of a step is chosen, and prompts that are being answered."""
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    choice = size + math.ceil(rollout.over_sampling * size)
    if not rollout.generates_ahead:
        return choice, choice
    batches = min(1 + rollout.max_staleness - updates, 1 + run.total_steps - step)
    return choice, max(choice, batches * size)


def collect(run: Run, pending: PendingRollout) -> tuple[list[Prompt], list[int], list[Episode]]:
    """Wait for a batch of responses; return the answered prompts, each response's key of its early
    score, and the responses. Prompts before the last answered one that are not answered return to
    the prompt loader, and come first in a later batch."""
    n, episodes = run.recipe.rollout.n, pending.generation.collect()
    run.checkpoints.partial = pending.generation.left_over
    keys = [each.prompt.uid * n + i % n for i, each in enumerate(episodes)]
    answered = {each.prompt.uid for each in episodes}
    last = max(i for i, prompt in enumerate(pending.prompts) if prompt.uid in answered)
    prompts = run.prompts.take(last + 1)
    assert prompts == pending.prompts[: last + 1]
    run.prompts.give_back([prompt for prompt in prompts if prompt.uid not in answered])
    return [prompt for prompt in prompts if prompt.uid in answered], keys, episodes


def go_on(run: Run, step: int) -> None:
    """Generate for later steps during a step's training, or free the engine's memory for it."""
    if run.recipe.rollout.generates_ahead and step < run.total_steps:
        run.ahead = submit(run, step + 1, updates=1)
    else:
        run.engine.sleep()
        run.roles.placement.prepare("reward", "forward")


def pause(run: Run, step: int) -> dict[str, float]:
    """Interrupt generation before the weights change; return how long it took until now."""
    if run.ahead is None:
        return {}
    with run.stage("wait_prev_gen", step):
        run.ahead.generation.wait()
    run.checkpoints.partial = run.ahead.generation.left_over
    return {"timing_s/gen_ahead": run.ahead.generation.seconds}


def resume(run: Run, step: int) -> None:
    """Go on with the weights of a step, if generation was interrupted for them."""
    if run.ahead is not None:
        run.ahead = submit(run, step + 1, updates=0)


@dataclass(frozen=True)
class Rollout:
    """Scored responses, ``rollout.n`` for each prompt, and the same packed and shared out.
    ``baseline_B`` has the score of a greedy response to each sequence's prompt, or is empty."""

    episodes: list[Episode]
    batch: Batch
    baseline_B: Tensor
    greedy: list[Episode]


class DynamicSampling:
    """Collects scored batches until an iteration has enough groups to train on: one, or with
    ``algorithm.filter_groups`` (DAPO, arXiv 2503.14476) until as many groups as a batch has prompts
    have scores that differ, up to ``max_num_gen_batches`` batches."""

    def __init__(self, recipe: Recipe) -> None:
        self._filter, self._size = recipe.algorithm.filter_groups, recipe.data.train_batch_size
        self._has_agent = recipe.rollout.agent is not None
        self._batches_left = self._filter.max_num_gen_batches if self._filter.enable else 1
        self._found: list[Rollout] = []
        self._informative = 0

    @property
    def needs_more(self) -> bool:
        return self._batches_left > 0 and self._informative < self._size

    @property
    def is_last(self) -> bool:
        return self._batches_left == 1

    @property
    def ended_early(self) -> bool:
        return self._batches_left > 0

    def add(self, rollout: Rollout) -> None:
        self._batches_left -= 1
        self._found.append(rollout)
        batch = rollout.batch
        chosen = informative_sequences(batch.scores_B, batch.group_B)
        self._informative += len(batch.group_B[chosen].unique())

    def result(self) -> tuple[Rollout, dict[str, float]]:
        """The data to train on (with ``filter_groups``, of groups of differing scores); metrics."""
        everything = self._found[0] if len(self._found) == 1 else _joined(self._found)
        episodes = everything.episodes
        metrics = reward_metrics(episodes, everything.greedy)
        if self._has_agent:
            metrics |= conversation_metrics(episodes)
        if not self._filter.enable:
            return everything, metrics
        batch = everything.batch
        chosen = first_groups(batch.scores_B, batch.group_B, self._size)
        places = batch.episodes.of_B[chosen].unique()  # the same order as ``episodes``
        kept = Rollout(
            [episodes[i] for i in places.tolist()],
            select_batch(batch, chosen),
            everything.baseline_B[chosen] if len(everything.baseline_B) else everything.baseline_B,
            everything.greedy,
        )
        return kept, metrics | {
            "train/num_gen_batches": float(len(self._found)),
            "train/informative_groups": self._informative / (len(self._found) * self._size),
        }


def _joined(parts: Sequence[Rollout]) -> Rollout:
    return Rollout(
        [episode for part in parts for episode in part.episodes],
        concatenate_batches([part.batch for part in parts]),
        torch.cat([part.baseline_B for part in parts]),
        [episode for part in parts for episode in part.greedy],
    )


def roll_out(run: Run, step: int, last: bool) -> Rollout:
    """Generate and score responses to the next prompts, the step's ``last`` or not. Collective."""
    with run.stage("gen", step):
        pending, run.ahead = run.ahead or submit(run, step, updates=0), None
        prompts, keys, episodes = collect(run, pending)
        greedy: list[Episode] = []
        if needs_greedy_baseline(run.recipe.algorithm):
            greedy = generate(run, prompts, run.recipe.rollout.greedy, step)
        if last:
            go_on(run, step)
    with run.stage("reward", step):
        episodes = with_scores(episodes, run.early.finish(keys, episodes))
        batch = pack_scored(run, episodes)
        greedy = with_scores(greedy, run.scorer.score(greedy))
        show_errors(run.reporter, step, episodes + greedy)
        baseline_B = torch.tensor([each.scored.score for each in greedy])
        baseline_B = baseline_B.repeat_interleave(run.recipe.rollout.n)
        baseline_B = baseline_B[batch.episodes.of_B] if greedy else baseline_B
        stop_request.sync()
    return Rollout(episodes, batch, baseline_B, greedy)


def pack_scored(run: Run, episodes: list[Episode]) -> Batch:
    # as in TRL, a response of maximal length has no end slot for its score
    end_slots_below, algorithm = 0, run.recipe.algorithm
    if algorithm.score_after_end:
        end_slots_below = run.recipe.data.max_response_length
    packed = pack_at_home(episodes, end_slots_below, algorithm.bootstrap_truncated)
    if algorithm.gdpo_reward_keys:
        packed = replace(packed, parts_B=_reward_parts(episodes, algorithm.gdpo_reward_keys))
    return share_out(packed, run.roles.actor.config.num_moe_experts)


def _reward_parts(episodes: Sequence[Episode], names: Sequence[str]) -> Tensor:
    """``Batch.parts_B``: these numbers of each score, or the score of a response without one;
    InputError if the reward function returned no number of such a name."""
    rows = []
    for episode in episodes:
        score = episode.scored
        if score.error is not None or score.unscored is not None:
            row = [score.score] * len(names)
        elif missing := [name for name in names if name not in score.numbers]:
            raise InputError(
                f"algorithm.gdpo_reward_keys: the result of a response has no number "
                f"{missing[0]!r}; it has {', '.join(score.numbers) or 'none'}: return a dict "
                "with it beside score"
            )
        else:
            row = [score.numbers[name] for name in names]
        rows += [row] * len(episode.sequences)
    return torch.tensor(rows, dtype=torch.float32)


def generate(
    run: Run, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int
) -> list[Episode]:
    limit = run.recipe.data.max_response_length
    seed = sampling_seed(run.recipe.trainer.seed, step)
    return run.engine.generate(GenerationRequest(prompts, sampling, limit, seed))


def show_errors(reporter: Reporter, step: int, episodes: Sequence[Episode]) -> None:
    """Report how many responses could not be scored, with the first error, and for each reason in
    ``UNSCORED`` how many score 0."""
    answers = [each for each in episodes if each.scored.error is None]
    for reason, count in unscored(answers).items():
        if count:
            text = f"{count:.0f} of {len(episodes)} responses {UNSCORED[reason]} and score 0"
            reporter.line(f"step {step}: {text}")
    errors = errors_of(episodes)
    if errors:
        text = f"{len(errors)} of {len(episodes)} responses have no score and get reward.on_error"
        reporter.line(f"step {step}: {text}; the first error: {errors[0]}")
