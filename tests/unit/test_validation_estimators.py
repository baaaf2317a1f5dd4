"""pass@k, best@k and maj@k against enumeration."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from mppo.trainer.validation.validation_metrics import (
    attempt_sizes,
    best_at_k,
    majority_at_k,
    pass_at_k,
)


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(right, k):
    samples = [1] * right + [0] * (5 - right)
    draws = [max(draw) for draw in combinations(samples, k)]
    assert pass_at_k(5, right, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("p", "n", "k"), [(0.3, 8, 4), (0.05, 16, 16), (0.9, 4, 1)])
def test_pass_at_k_is_unbiased(p, n, k):
    expected = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)
    assert best_at_k([0.0] * 4999 + [1.0], 2500) == pytest.approx(0.5)


@pytest.mark.parametrize("k", range(1, 6))
def test_best_at_k_is_the_mean_of_the_best_of_all_draws(k):
    scores = [0.5, -1.0, 0.5, 2.0, 0.0]
    draws = [max(draw) for draw in combinations(scores, k)]
    assert best_at_k(scores, k) == pytest.approx(sum(draws) / len(draws))
    right = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert best_at_k(right, k) == pytest.approx(pass_at_k(5, 2, k))


@pytest.mark.parametrize(
    ("answers", "right", "k", "share"),
    [
        ("aab", (1, 1, 0), 3, 1.0),
        ("abb", (1, 0, 0), 3, 0.0),
        ("ab", (1, 0), 2, 1.0),  # a tie: the first answer
        ("ba", (0, 1), 2, 0.0),
        ("aabb", (1, 1, 0, 0), 2, 0.5),  # two votes of two
        ("aabbb", (1, 1, 0, 0, 0), 2, 0.5),  # the fifth sample is in no vote
        ("  a", (0, 0, 1), 3, 1.0),  # samples without an answer do not vote
        ("  ", (0, 0), 2, 0.0),
    ],
)
def test_majorities(answers, right, k, share):
    given = [answer.strip() for answer in answers]
    assert majority_at_k(given, [bool(one) for one in right], k) == share


def test_ks_are_powers_of_two_and_the_number_of_samples():
    sizes = {n: attempt_sizes(n) for n in (1, 2, 3, 8, 10)}
    assert sizes == {1: [1], 2: [1, 2], 3: [1, 2, 3], 8: [1, 2, 4, 8], 10: [1, 2, 4, 8, 10]}
