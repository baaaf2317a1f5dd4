"""Credit across the segments of an episode (CompactionRL), against the paper's definition."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from random_outputs import outputs_of

from mppo.algos.gae import segment_credit, tokens_after
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.trainer.advantages import estimate

LENGTHS = [5, 3, 0, 40, 1, 7, 2, 9]
EPISODES = [4, 4, 4, 9, 7, 7, 7, 2]
"""Segments of an episode follow each other in time; one is empty."""
SCORES = [1.0, 1.0, 1.0, -0.5, 2.0, 2.0, 2.0, 0.0]


def segments(seed: int):
    outputs = outputs_of(LENGTHS, SCORES, seed, prompt=2, samples=1)
    mask_T = outputs.batch.response_mask_T.clone()
    mask_T[50] = 0.0  # a gap: a tool's answer inside the segment of 40 tokens
    gap_B = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0])
    batch = replace(
        outputs.batch,
        response_mask_T=mask_T,
        response_B=outputs.batch.response_B - gap_B,
        inserted_B=gap_B,
        episode_B=torch.tensor(EPISODES),
    )
    return replace(outputs, batch=batch, values_T=outputs.values_T * mask_T)


def of_paper(outputs, gamma: float, alpha: float | None, lam: float) -> list[list[float]]:
    """Local GAE of each segment times ``(gamma lambda_s)^(generated tokens of later segments)``."""
    batch, found, generated = outputs.batch, [], []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        generated.append([t for t in range(start, end) if batch.response_mask_T[t] > 0])
    for number, tokens in enumerate(generated):
        own = lam if alpha is None else max(0.0, 1 - 1 / max(alpha * len(tokens), 1.0))
        later = [i for i in range(number + 1, len(generated)) if EPISODES[i] == EPISODES[number]]
        after = sum(len(generated[i]) for i in later)
        advantages, ahead, value = [], 0.0, 0.0
        for place, t in reversed(list(enumerate(tokens))):
            reward = SCORES[number] if place == len(tokens) - 1 else 0.0
            mine = float(outputs.values_T[t])
            ahead = reward + gamma * value - mine + gamma * own * ahead
            value = mine
            advantages.insert(0, ahead * (gamma * own) ** after)
        found.append(advantages)
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.98])
@pytest.mark.parametrize(("alpha", "lam"), [(1.5, 1.0), (None, 0.9), (None, 1.0)])
def test_advantages_are_those_of_the_paper(gamma, alpha, lam):
    settings = {"gamma": gamma, "lam_length_adaptive_alpha": alpha, "lam": lam}
    algorithm = AlgorithmConfig(**settings, segment_credit=True, whiten_advantages=False)
    plain = AlgorithmConfig(**settings, whiten_advantages=False)
    for seed in range(3):
        outputs = segments(seed)
        experience = estimate(outputs, algorithm, 0.0)
        expected = [x for part in of_paper(outputs, gamma, alpha, lam) for x in part]
        inside = outputs.batch.response_mask_T > 0
        torch.testing.assert_close(
            experience.advantages_T[inside], torch.tensor(expected), atol=1e-6, rtol=1e-6
        )
        assert not experience.advantages_T[~inside].any()
        local = estimate(outputs, plain, 0.0)
        assert torch.equal(experience.returns_T, local.returns_T), "the critic's are local"


def test_an_episode_of_one_sequence_is_as_before():
    outputs = outputs_of([4, 2, 7], seed=1)
    settings = {"lam": 0.9, "gamma": 0.97}
    with_credit = estimate(outputs, AlgorithmConfig(**settings, segment_credit=True), 0.0)
    without = estimate(outputs, AlgorithmConfig(**settings), 0.0)
    assert torch.equal(with_credit.advantages_T, without.advantages_T)


def test_tokens_after_by_hand_and_in_any_order_of_episodes():
    length, episode = torch.tensor([3, 10, 5, 20, 2]), torch.tensor([1, 0, 1, 0, 1])
    assert tokens_after(length, episode).tolist() == [7, 20, 2, 0, 0]
    assert tokens_after(torch.zeros(0, dtype=torch.int64), torch.zeros(0).long()).tolist() == []


def test_credit_keeps_its_digits_over_long_segments():
    lam = 1 - 1 / (1.5 * 60_000)
    (credit,) = segment_credit(torch.tensor([120_000]), 1.0, lam).tolist()
    assert credit == pytest.approx(math.exp(120_000 * math.log(lam)), rel=1e-9)
    assert segment_credit(torch.tensor([0, 3]), 1.0, 0.0).tolist() == [1.0, 0.0]
