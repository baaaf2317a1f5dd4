"""PF-PPO, score normalisation, ptx and moving averages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algos import pf_ppo
from mppo.algos.policy_loss import ptx_loss
from mppo.algos.reward_normalization import (
    RewardStats,
    ScoreScale,
    batch_scale,
    group_scale,
)


def test_pf_ppo_weights_by_hand():
    scores = torch.tensor([-2.0, 0.0, 1.0, 1.0])
    floor = pf_ppo.WEIGHT_FLOOR
    expected = {
        "pow": [4.0, 0.0, 1.0, 1.0],
        "max_min": [1.0, 0.0, 1.0, 1.0],
        "max_random": [0.1, 0.1, 0.4, 0.4],
    }
    for method, weights in expected.items():
        actual = pf_ppo.resampling_weights(scores, method, 2.0)
        torch.testing.assert_close(actual, torch.tensor(weights) + floor)
    with pytest.raises(ValueError, match="max_random"):
        pf_ppo.resampling_weights(scores, "best")


def test_pf_ppo_draws_the_same_for_the_same_seed_and_by_weight():
    weights = torch.tensor([1e-8, 1.0, 1e-8, 3.0])
    first = pf_ppo.resample(weights, seed=5)
    assert torch.equal(first, pf_ppo.resample(weights, seed=5))
    assert len(first) == 4
    drawn = torch.cat([pf_ppo.resample(weights, seed) for seed in range(500)])
    assert set(drawn.tolist()) == {1, 3}
    assert (drawn == 3).double().mean().item() == pytest.approx(0.75, abs=0.03)


def test_pf_ppo_with_equal_or_zero_scores_can_still_draw():
    for method in ("pow", "max_min", "max_random"):
        drawn = pf_ppo.resample(pf_ppo.resampling_weights(torch.zeros(3), method), 0)
        assert len(drawn) == 3
    assert pf_ppo.resample(torch.tensor([1e-8]), 0).tolist() == [0]


def test_normalisation_by_hand():
    scores = torch.tensor([1.0, 3.0, 5.0])
    assert ScoreScale(1.0, 2.0)(scores).tolist() == [0.0, 1.0, 2.0]
    torch.testing.assert_close(batch_scale(scores)(scores), torch.tensor([-1.0, 0.0, 1.0]))
    alone = torch.tensor([4.0])
    assert batch_scale(alone)(alone).tolist() == [0.0]
    grouped = group_scale(scores, torch.tensor([0, 0, 9]))(scores)
    torch.testing.assert_close(grouped, torch.tensor([-(0.5**0.5), 0.5**0.5, 5.0]))


def test_equal_scores_become_zero_without_a_division():
    scores, other = torch.full((6,), 0.1), torch.full((6,), 1.1)
    moments = RewardStats()
    moments.merge(scores)
    moments.merge(scores)
    scales = (batch_scale(scores), group_scale(scores, torch.zeros(6)), moments.scale())
    for scale in (*scales, batch_scale(scores[:1])):
        assert not scale(scores[:1]).any()
        torch.testing.assert_close(scale(other)[:1], torch.ones(1))


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6))
def test_running_moments_equal_those_of_all_scores_together(batches):
    moments = RewardStats()
    for batch in batches:
        moments.merge(torch.tensor(batch))
    everything = torch.tensor([x for batch in batches for x in batch], dtype=torch.float32).double()
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(everything.mean().item(), rel=1e-9, abs=1e-9)
    if len(everything) > 1:
        assert moments.std == pytest.approx(everything.std().item(), rel=1e-6, abs=1e-6)
    assert torch.isfinite(moments.scale()(torch.tensor([1.0]))).all()


def test_running_moments_resume_exactly():
    straight, first, second = RewardStats(), RewardStats(), RewardStats()
    batches = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for batch in batches:
        straight.merge(batch)
    for batch in batches[:2]:
        first.merge(batch)
    second.load_state_dict(first.state_dict())
    for batch in batches[2:]:
        second.merge(batch)
    assert second.state_dict() == straight.state_dict()


def test_ptx_loss_by_hand_and_over_micro_batches():
    logprobs = torch.tensor([0.0, -1.0, -3.0, -5.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0])
    complete = ptx_loss(logprobs, mask, 3.0)
    assert complete.item() == pytest.approx(9 / 3)
    parts = ptx_loss(logprobs[:2], mask[:2], 3.0) + ptx_loss(logprobs[2:], mask[2:], 3.0)
    torch.testing.assert_close(parts, complete)
    assert ptx_loss(logprobs[:0], mask[:0], 0.0).item() == 0.0
    assert math.isfinite(ptx_loss(logprobs, mask * 0, 0.0).item())
