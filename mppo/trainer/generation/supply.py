"""The supply of episodes: which prompts are being answered, and which answers make a batch.

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

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.rollout.engine import GenerationRequest, sampling_seed
from mppo.trainer.run import PendingRollout, Run


def submit(run: Run, step: int, updates: int) -> PendingRollout:
    """Start generating and scoring responses to the prompts of a step and of those after it. The
    prompts are consumed only when their responses are collected: a checkpoint saved earlier does
    not count them, and holds the responses that have arrived. ``updates`` counts those of the
    weights until ``step``, which trains on the first batch."""
    rollout, size = run.recipe.rollout, run.prompts.batch_size
    choice, count = _counts(run, step, updates)
    prompts = run.prompts.peek(count)
    keys = [key_of(run, prompt, sample) for prompt in prompts for sample in range(rollout.n)]

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


def key_of(run: Run, prompt: Prompt, sample: int) -> int:
    return prompt.uid * run.recipe.rollout.n + sample


def collect(run: Run, pending: PendingRollout) -> tuple[list[Prompt], list[int], list[Episode]]:
    """Wait for a batch of responses; return the answered prompts, each response's key of its early
    score, and the responses. Prompts before the last answered one that are not answered return to
    the prompt loader, and come first in a later batch."""
    n, episodes = run.recipe.rollout.n, pending.generation.collect()
    run.checkpoints.partial = pending.generation.left_over
    keys = [key_of(run, each.prompt, i % n) for i, each in enumerate(episodes)]
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
