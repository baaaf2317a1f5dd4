"""Means, whitening and sums over masked tokens, and selecting sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algos.aggregation import aggregation_weights_T
from mppo.algos.masked import (
    last_masked_index,
    masked_whiten,
    masked_whiten_by_group,
    merged_moments,
    place_at_last,
    sequence_mean,
    sequence_moments,
    sequence_sum,
)
from mppo.algos.token_axis import select_cu_seqlens, select_sequences

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def moments_of(x, mask, cu_seqlens=None):
    bounds = torch.tensor([0, len(x)]) if cu_seqlens is None else cu_seqlens
    return merged_moments(sequence_moments(x, mask, bounds))


def test_moments_of_masked_tokens():
    x = torch.tensor([1.0, 2.0, 100.0, 3.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    for bounds in (None, torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 2, 3, 4])):
        moments = moments_of(x, mask, bounds)
        assert (moments.count, moments.mean, moments.squares) == (3.0, 2.0, 2.0)
        assert (moments.max, moments.min) == (3.0, 1.0)
        assert (moments.var(), moments.var(unbiased=False)) == (1.0, 2 / 3)
    nothing = moments_of(x, mask * 0)
    assert (nothing.count, nothing.mean, nothing.var()) == (0.0, 0.0, 0.0)


def test_moments_ignore_what_lies_outside_the_mask():
    x = torch.tensor([1.0, math.nan, math.inf])
    assert moments_of(x, torch.tensor([1.0, 0.0, 0.0])).mean == 1.0


def test_whitening_by_hand():
    x = torch.tensor([1.0, 2.0, 9.0, 3.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    kept_mean = masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept_mean, torch.tensor([1.0, 2.0, 0.0, 3.0]))
    biased = masked_whiten(x, mask, unbiased=False)
    torch.testing.assert_close(biased[3], torch.tensor(1 / math.sqrt(2 / 3)))


def test_whitening_at_the_edges_is_finite():
    for x, mask in (
        (torch.tensor([5.0]), torch.ones(1)),
        (torch.tensor([5.0, 5.0]), torch.ones(2)),
        (torch.tensor([5.0, 7.0]), torch.zeros(2)),
        (torch.zeros(0), torch.zeros(0)),
    ):
        assert masked_whiten(x, mask).tolist() == [0.0] * len(x)


def test_whitening_by_group_is_whitening_of_each_group_alone():
    # the responses of two prompts in mixed order; one prompt has a single unmasked token
    cu_seqlens, group = torch.tensor([0, 2, 4, 7, 8]), torch.tensor([5, 2, 5, 9])
    x = torch.tensor([1.0, 2.0, 7.0, 9.0, 3.0, 50.0, 6.0, 4.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    # group 5: 1, 2, 3, 6, mean 3, squares 4 + 1 + 0 + 9; group 2: 7, 9; group 9: 4
    deviation, half = (14 / 3) ** 0.5, 0.5**0.5
    expected = [-2 / deviation, -1 / deviation, -half, half, 0.0, 0.0, 3 / deviation, 0.0]
    whitened = masked_whiten_by_group(x, mask, cu_seqlens, group)
    torch.testing.assert_close(whitened, torch.tensor(expected))
    one_group = masked_whiten_by_group(x, mask, cu_seqlens, group * 0, unbiased=False)
    torch.testing.assert_close(one_group, masked_whiten(x, mask, unbiased=False))
    nothing = torch.zeros(0)
    assert len(masked_whiten_by_group(nothing, nothing, torch.tensor([0]), nothing.long())) == 0
    assert not masked_whiten_by_group(x, mask * 0, cu_seqlens, group).any()


@settings(max_examples=30)
@given(st.integers(2, 300), st.integers(0, 10**6))
def test_whitened_tokens_have_mean_zero_and_variance_almost_one(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64) * 3 + 7
    whitened = masked_whiten(x, torch.ones(n, dtype=torch.float64))
    assert abs(whitened.mean().item()) < 1e-9
    assert whitened.var().item() == pytest.approx((x.var() / (x.var() + 1e-8)).item())


@pytest.mark.parametrize("drift", [0.0, 1e3])
def test_whitening_far_from_zero_keeps_float32_precision(drift):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, generator=generator) + 50.0 + torch.linspace(0.0, drift, 100)
    mask = (torch.rand(100, generator=generator) > 0.4).float()
    mask[:40] = 0.0
    inside = x.double()[mask > 0]
    expected = torch.zeros(100, dtype=torch.float64)
    expected[mask > 0] = (inside - inside.mean()) / inside.std()
    torch.testing.assert_close(masked_whiten(x, mask).double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_means_and_last_tokens_of_sequences():
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    assert sequence_sum(x, cu_seqlens).tolist() == [3.0, 0.0, 12.0]
    assert sequence_mean(x, mask, cu_seqlens).tolist() == [2.0, 0.0, 3.5]
    assert last_masked_index(mask, cu_seqlens).tolist() == [1, -1, 3]
    placed = place_at_last(torch.tensor([7.0, 8.0, 9.0]), mask, cu_seqlens)
    assert placed.tolist() == [0.0, 7.0, 0.0, 9.0, 0.0]


def test_selecting_sequences_keeps_their_tokens_in_any_order():
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    x = torch.arange(5)
    assert select_sequences(x, cu_seqlens, [2, 0, 2]).tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert select_cu_seqlens(cu_seqlens, [2, 0, 1]).tolist() == [0, 3, 5, 5]
    assert select_sequences(x, cu_seqlens, []).tolist() == []


def test_aggregation_weights_by_hand():
    # sequence 0: 1 token, sequence 1: none, sequence 2: 3 tokens
    cu_seqlens = torch.tensor([0, 2, 3, 6])
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    expected = {
        "token-mean": [0, 1 / 4, 0, 1 / 4, 1 / 4, 1 / 4],
        "token-sum": [0, 1, 0, 1, 1, 1],
        "seq-mean-token-sum": [0, 1 / 2, 0, 1 / 2, 1 / 2, 1 / 2],
        "seq-mean-token-mean": [0, 1 / 2, 0, 1 / 6, 1 / 6, 1 / 6],
        "seq-mean-token-sum-norm": [0, 1 / 20, 0, 1 / 20, 1 / 20, 1 / 20],
    }
    for mode, weights in expected.items():
        actual = aggregation_weights_T(mask, cu_seqlens, mode, 10.0)
        torch.testing.assert_close(actual, torch.tensor(weights, dtype=torch.float32))


def test_aggregation_of_nothing_is_zero():
    for mode in MODES:
        weights = aggregation_weights_T(torch.zeros(3), torch.tensor([0, 1, 3]), mode)
        assert weights.tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=30)
@given(st.permutations(range(4)), st.sampled_from(MODES))
def test_aggregation_does_not_depend_on_the_order_of_sequences(order, mode):
    cu_seqlens = torch.tensor([0, 3, 4, 9, 11])
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(11, generator=generator) > 0.3).float()
    losses = torch.randn(11, generator=generator)
    expected = (aggregation_weights_T(mask, cu_seqlens, mode) * losses).sum()
    shuffled = aggregation_weights_T(
        select_sequences(mask, cu_seqlens, order), select_cu_seqlens(cu_seqlens, order), mode
    )
    actual = (shuffled * select_sequences(losses, cu_seqlens, order)).sum()
    torch.testing.assert_close(actual, expected)
