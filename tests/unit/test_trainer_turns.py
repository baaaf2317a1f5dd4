"""GAE over turns in the trainer: what the critic learns, and the metrics of its states."""

from __future__ import annotations

import pytest
import torch
from mini_batch_objectives import value_objective

from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.roles import CriticConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics
from mppo.trainer.targets import value_targets

GAMMA, LAM, LAM_VALUE = 0.99, 0.9, 1.0
PARTS = [
    ((0, 2), (NO_WEIGHTS, 3), (0, 1), (NO_WEIGHTS, 1), (0, 3)),
    ((0, 4),),
    ((0, 1), (NO_WEIGHTS, 2), (0, 2)),
]
"""Turns of the policy and, between them, of an environment."""


def conversations(scores=(1.0, -0.5, 2.0), rewarded=(0.0,) * 10, slots=0) -> Outputs:
    """Three conversations with prompts of two tokens; the first one's tokens have rewards."""
    random = torch.Generator().manual_seed(1)
    episodes = []
    for uid, parts in enumerate(PARTS):
        count = sum(n for _, n in parts)
        tokens = EpisodeTokens(range(count), [0.0] * count)
        prompt, (last, _) = Prompt(uid, (7, 8), "", "", ""), parts[-1]
        episodes.append(Episode.sampled(prompt, tokens, "stop", last, parts[:-1]))
    given = [ResponseScore(score) for score in scores]
    total = sum(rewarded)
    given[0] = ResponseScore(scores[0] + total, token_total=total, token_rewards=rewarded)
    batch = pack_episodes(with_scores(episodes, given), slots)
    values_T = torch.randn(len(batch.tokens_T), generator=random) * batch.value_mask_T
    zeros_T = torch.zeros_like(values_T)
    return Outputs(batch, zeros_T, zeros_T, values_T)


def turns_of(outputs: Outputs) -> list[list[list[int]]]:
    """The tokens of each turn of each conversation, as indices of the batch."""
    found = []
    for parts, start in zip(PARTS, outputs.batch.cu_seqlens.tolist()):
        place, turns = start + 2, []
        for version, count in parts:
            if version != NO_WEIGHTS:
                turns.append(list(range(place, place + count)))
            place += count
        found.append(turns)
    return found


def by_hand(outputs: Outputs, rewards: list[list[float]], lam: float):
    """(turn, its advantage, its value) by the recursion of the paper; rewards are of turns."""
    values, found = outputs.values_T.tolist(), []
    for turns, of_turns in zip(turns_of(outputs), rewards):
        later, next_value = 0.0, 0.0
        for turn, reward in reversed([*zip(turns, of_turns)]):
            value = values[turn[0]]
            later = reward + GAMMA * next_value - value + GAMMA * lam * later
            next_value = value
            found.append((turn, later, value))
    return found


def algorithm(**options) -> AlgorithmConfig:
    return AlgorithmConfig(
        gae_unit="turn", gamma=GAMMA, lam=LAM, lam_value=LAM_VALUE, whiten_advantages=False,
        **options,
    )  # fmt: skip


def test_every_token_of_a_turn_has_the_turns_advantage_and_its_first_one_the_return():
    # rewards of single tokens: of the first turn .5 and .25, of the environment's answer to it 1
    rewarded = (0.5, 0.25, 0, 1.0, 0, 0, 0, 0, 0, 0.125)
    outputs = conversations(rewarded=rewarded)
    experience = estimate(outputs, algorithm(), 0.0)
    rewards = [[1.75, 0.0, 1.125], [-0.5], [0.0, 2.0]]
    advantages, returns = (torch.zeros_like(outputs.values_T) for _ in range(2))
    for turn, advantage, _ in by_hand(outputs, rewards, LAM):
        advantages[turn] = advantage
    for turn, advantage, value in by_hand(outputs, rewards, LAM_VALUE):
        returns[turn[0]] = advantage + value
    torch.testing.assert_close(experience.advantages_T, advantages, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(experience.returns_T, returns, atol=1e-6, rtol=1e-6)


def test_the_critic_learns_one_value_per_turn():
    outputs = conversations()
    experience = estimate(outputs, algorithm(), 0.0)
    first = [turn[0] for turns in turns_of(outputs) for turn in turns]
    critic = CriticConfig(cliprange_value=None)
    targets = value_targets(experience, range(3), critic, 9, gae_unit="turn")
    values = (outputs.values_T + 0.3).requires_grad_()
    loss, _ = value_objective(values, targets, critic)
    expected = 0.5 * (values - experience.returns_T)[first].square().mean()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    ours, theirs = (
        torch.autograd.grad(each, values, retain_graph=True)[0] for each in (loss, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    parts = [
        value_objective(values.detach()[a:b], value_targets_of(experience, [i], critic), critic)[0]
        for i, (a, b) in enumerate(zip(outputs.batch.cu_seqlens, outputs.batch.cu_seqlens[1:]))
    ]
    counts = torch.tensor([len(turns) for turns in turns_of(outputs)])
    torch.testing.assert_close((torch.stack(parts) * counts).sum() / 6, expected.detach())


def value_targets_of(experience, indices, critic):
    return value_targets(experience, indices, critic, 9, gae_unit="turn")


def test_metrics_of_values_are_over_turns():
    outputs = conversations()
    experience = estimate(outputs, algorithm(), 0.0)
    first = [turn[0] for turns in turns_of(outputs) for turn in turns]
    metrics = experience_metrics(experience, "turn")
    returns, values = experience.returns_T[first].double(), outputs.values_T[first].double()
    assert metrics["critic/values/mean"] == pytest.approx(values.mean().item(), abs=1e-6)
    assert metrics["critic/returns/min"] == pytest.approx(returns.min().item(), abs=1e-6)
    explained = 1 - (returns - values).var() / (returns.var() + 1e-5)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained.item(), abs=1e-6)


def test_an_end_slot_is_a_state_after_the_last_turn():
    outputs = conversations(slots=99)
    batch = outputs.batch
    slots = batch.end_mask_T.nonzero()[:, 0]
    assert len(slots) == 3
    experience = estimate(outputs, algorithm(score_after_end=True), 0.0)
    # the score is the reward of the slot
    torch.testing.assert_close(experience.returns_T[slots], batch.scores_B)
    last = [turns[-1][0] for turns in turns_of(outputs)]
    torch.testing.assert_close(experience.returns_T[last], GAMMA * batch.scores_B)
    assert not experience.advantages_T[slots].any()
