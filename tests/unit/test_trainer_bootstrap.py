"""``algorithm.bootstrap_truncated``: the critic's value in place of what would have followed."""

from __future__ import annotations

import itertools

import pytest
import torch
from mini_batch_objectives import value_objective

from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics
from mppo.trainer.targets import policy_targets, value_targets

LIMIT = 6
REASONS = ("stop", "length", "length", "stop", "abort", "length")
LENGTHS = (3, 6, 4, 6, 2, 0)
GAMMA, LAM, BETA = 0.97, 0.9, 0.05
PLAIN = {"gamma": GAMMA, "whiten_advantages": False, "use_kl_in_reward": True}


def outputs_of(seed: int, slots_below: int = 0) -> Outputs:
    """Responses to prompts of two tokens: that stopped, were cut off, broke off, or are empty."""
    random = torch.Generator().manual_seed(seed)
    episodes = [
        Episode.sampled(
            Prompt(i, (7, 8), "", "", ""), EpisodeTokens(range(n), [0.0] * n), reason, 0
        )
        for i, (n, reason) in enumerate(zip(LENGTHS, REASONS))
    ]
    scores = list(map(ResponseScore, torch.randn(6, generator=random).tolist()))
    batch = pack_episodes(with_scores(episodes, scores), slots_below, bootstraps=True)
    logprobs_T, ref_T, values_T = torch.randn(3, len(batch.tokens_T), generator=random)
    mask_T = batch.response_mask_T
    return Outputs(batch, logprobs_T * mask_T, ref_T * mask_T, values_T * batch.value_mask_T)


def states(x_T: torch.Tensor, outputs: Outputs) -> list[list[float]]:
    """Of each response the numbers of its tokens and its end slot."""
    batch = outputs.batch
    bounds = batch.cu_seqlens.tolist()
    return [x_T[a + 2 : b].tolist() for a, b in itertools.pairwise(bounds)]


def test_a_slot_follows_every_response_that_was_cut_off_by_its_length():
    batch = outputs_of(0).batch
    assert batch.end_B.tolist() == [0, 1, 1, 0, 0, 0]
    assert batch.prompt_B.tolist() == [2] * 6
    assert batch.response_B.tolist() == list(LENGTHS)
    both = outputs_of(0, LIMIT).batch
    assert both.end_B.tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("lam", [1.0, LAM])
@pytest.mark.parametrize("seed", range(3))
def test_the_reward_of_a_response_that_was_cut_off_is_the_value_of_its_last_state(seed, lam):
    outputs = outputs_of(seed)
    algorithm = AlgorithmConfig(bootstrap_truncated=True, lam=lam, **PLAIN)
    experience = estimate(outputs, algorithm, BETA)
    kl = states(outputs.logprobs_T - outputs.ref_logprobs_T, outputs)
    values, scores = states(outputs.values_T, outputs), outputs.batch.scores_B.tolist()
    found = zip(states(experience.advantages_T, outputs), states(experience.returns_T, outputs))
    for i, (advantages, returns) in enumerate(found):
        n = LENGTHS[i]
        rewards = [-BETA * each for each in kl[i][:n]]
        cut = REASONS[i] == "length" and n > 0
        if n and not cut:
            rewards[-1] += scores[i]
        after = values[i][n] if cut else 0.0  # V(s_T)
        later, next_value, want = 0.0, after, []
        for t in reversed(range(n)):
            later = rewards[t] + GAMMA * next_value - values[i][t] + GAMMA * lam * later
            next_value = values[i][t]
            want.insert(0, later)
        assert advantages[:n] == pytest.approx(want, abs=1e-6)
        targets = [a + v for a, v in zip(want, values[i])]
        assert returns[:n] == pytest.approx(targets, abs=1e-6)
        assert advantages[n:] == [0.0] * cut


def test_with_gamma_and_lambda_1_the_return_is_the_value():
    outputs = outputs_of(4)
    algorithm = AlgorithmConfig(bootstrap_truncated=True, whiten_advantages=False)
    experience = estimate(outputs, algorithm, 0.0)
    returns = states(experience.returns_T, outputs)
    last = states(outputs.values_T, outputs)
    for i in (1, 2):
        assert returns[i] == pytest.approx([last[i][-1]] * (LENGTHS[i] + 1), abs=1e-6)


@pytest.mark.parametrize("slots_below", [0, LIMIT])
@pytest.mark.parametrize("unit", ["token", "turn"])
def test_neither_role_learns_at_the_slot(slots_below, unit):
    outputs = outputs_of(1, slots_below)
    batch = outputs.batch
    algorithm = AlgorithmConfig(
        bootstrap_truncated=True, score_after_end=slots_below > 0, gae_unit=unit
    )
    experience = estimate(outputs, algorithm, 0.0)
    slot = [int(batch.cu_seqlens[i + 1]) - 1 for i in (1, 2)]
    assert batch.end_mask_T[slot].tolist() == [1, 1]
    targets = value_targets(experience, range(6), CriticConfig(), LIMIT, gae_unit=unit)
    assert targets.mask_T[slot].tolist() == [0, 0]
    assert targets.mask_T.sum() == (5 if unit == "turn" else 21) + (slots_below > 0)
    assert policy_targets(experience, range(6), ActorConfig(), LIMIT).mask_T.sum() == 21
    values = outputs.values_T.clone().requires_grad_()
    loss, _ = value_objective(values, targets, CriticConfig())
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient[slot].tolist() == [0, 0]
    metrics = experience_metrics(experience, unit)
    assert metrics["response_length/mean"] == sum(LENGTHS) / 6


def test_a_turn_that_was_cut_off_is_followed_by_the_value_of_its_last_state():
    outputs = outputs_of(2)
    algorithm = AlgorithmConfig(
        bootstrap_truncated=True, gae_unit="turn", gamma=GAMMA, whiten_advantages=False
    )
    experience = estimate(outputs, algorithm, 0.0)
    values = states(outputs.values_T, outputs)
    for i in (1, 2):
        want = GAMMA * values[i][-1] - values[i][0]
        found = states(experience.advantages_T, outputs)[i]
        assert found == pytest.approx([want] * LENGTHS[i] + [0.0], abs=1e-6)
