"""Critic-free advantages from the scores of a group, by hand and by property."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo import register
from mppo.algos import group_baselines as groups

SCORES = torch.tensor([1.0, 3.0, 5.0, 7.0])
GROUP = torch.tensor([8, 8, 8, 2])  # three samples of one prompt, one of another


def test_grpo_by_hand():
    # mean 3, unbiased deviation 2; the group of one: mean 0, deviation 1
    expected = torch.tensor([-1.0, 0.0, 1.0, 7.0])
    torch.testing.assert_close(groups.grpo(SCORES, GROUP, True), expected, rtol=1e-5, atol=1e-6)
    assert groups.grpo(SCORES, GROUP, False).tolist() == [-2.0, 0.0, 2.0, 7.0]
    assert groups.mean_baseline(SCORES, GROUP).tolist() == [-2.0, 0.0, 2.0, 7.0]


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - (3 + 5) / 2, 3 - (1 + 5) / 2, 5 - (1 + 3) / 2
    torch.testing.assert_close(groups.rloo(SCORES, GROUP), torch.tensor([-3.0, 0.0, 3.0, 7.0]))
    vectorized = groups.rloo_vectorized(SCORES, GROUP)
    torch.testing.assert_close(vectorized, torch.tensor([-3.0, 0.0, 3.0, 0.0]))


def test_opo_weights_the_baseline_by_length():
    length = torch.tensor([1.0, 1.0, 2.0, 4.0])
    # (1 + 3 + 10) / 4 = 3.5
    expected = torch.tensor([-2.5, -0.5, 1.5, 7.0])
    torch.testing.assert_close(groups.opo(SCORES, GROUP, length), expected)
    without_tokens = groups.opo(SCORES, GROUP, torch.zeros(4))
    assert without_tokens.tolist() == SCORES.tolist()


def test_gpg_scales_by_the_share_of_nonzero_scores():
    scores = torch.tensor([0.0, 1.0, 0.0, 0.0])
    group = torch.tensor([0, 0, 1, 1])
    # alpha = 4 / 1; mean 0.5 and 0
    assert groups.gpg(scores, group, 2.0).tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert groups.gpg(torch.zeros(4), group).tolist() == [0.0] * 4


def test_equal_scores_give_no_advantage():
    scores, group = torch.full((4,), 0.3), torch.tensor([1, 1, 1, 1])
    for name, formula in register.estimator.items():
        advantage = formula(scores, group, torch.ones(4), groups.OutcomeOptions())
        torch.testing.assert_close(advantage, torch.zeros(4), msg=name)


def test_an_empty_batch_gives_empty_advantages():
    nothing = torch.zeros(0)
    for formula in register.estimator.values():
        group = torch.zeros(0, dtype=torch.int64)
        assert len(formula(nothing, group, nothing, groups.OutcomeOptions())) == 0


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.randoms())
def test_estimators_do_not_depend_on_the_order_of_samples(labels, random):
    order = list(range(len(labels)))
    random.shuffle(order)
    group = torch.tensor(labels)
    generator = torch.Generator().manual_seed(len(labels))
    scores = torch.randn(len(labels), generator=generator, dtype=torch.float64)
    length = torch.randint(0, 9, (len(labels),), generator=generator).double()
    for name, formula in register.estimator.items():
        options = groups.OutcomeOptions()
        straight = formula(scores, group, length, options)
        shuffled = formula(scores[order], group[order], length[order], options)
        torch.testing.assert_close(shuffled, straight[order], msg=name)
        assert torch.isfinite(straight).all()


@settings(max_examples=40)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9), st.floats(-50, 50))
def test_a_constant_added_to_a_group_changes_nothing(values, shift):
    scores = torch.tensor(values, dtype=torch.float64)
    group = torch.zeros(len(values), dtype=torch.int64)
    for formula in (groups.mean_baseline, groups.rloo):
        torch.testing.assert_close(
            formula(scores + shift, group), formula(scores, group), rtol=1e-6, atol=1e-9
        )
    total = groups.mean_baseline(scores, group).sum().item()
    assert math.isclose(total, 0.0, abs_tol=1e-9)
