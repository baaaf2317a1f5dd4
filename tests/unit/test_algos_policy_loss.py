"""Every policy loss and the value loss: numbers by hand, gradients by finite differences, edges."""

import math

import pytest
import torch

from mppo.algos import policy_loss as losses
from mppo.algos.covariance import MiniBatchTokens, covariance, covariance_band, covariance_top
from mppo.algos.value_loss import value_loss

CU = torch.tensor([0, 2, 3, 6])
LOW, HIGH = 0.2, 0.3


def inputs(dtype=torch.float64, spread=0.3):
    """Log-probabilities now and before, advantages and mask of three sequences."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=generator, dtype=dtype) - 0.5
    new = old + spread * torch.randn(6, generator=generator, dtype=dtype)
    advantages = torch.randn(6, generator=generator, dtype=dtype)
    mask = torch.tensor([1, 1, 1, 0, 1, 1], dtype=dtype)
    return new, old, advantages, mask


def every_loss(new, old, advantages, mask, selected=None):
    """Token losses by name."""
    ratio, log_ratio = losses.importance_ratio(new, old)
    selected = torch.zeros_like(mask) if selected is None else selected
    return {
        "vanilla": losses.clipped_surrogate(ratio, advantages, LOW, HIGH, 3.0),
        "no dual clip": losses.clipped_surrogate(ratio, advantages, LOW, HIGH, None),
        "gspo": losses.gspo(new, old, advantages, mask, CU, LOW, HIGH),
        "gmpo": losses.gmpo(new, old, advantages, mask, CU, 0.4, 0.4),
        "cispo": losses.cispo(new, ratio, advantages, LOW, HIGH),
        "dis": losses.dis(new, ratio, advantages, 0.3, 5.0),
        "sapo": losses.sapo(ratio, advantages, 1.0, 1.05),
        "clip_cov": losses.clip_cov(ratio, advantages, selected, LOW, HIGH),
        "kl_cov": losses.kl_cov(ratio, log_ratio, advantages, selected, 0.5),
        "gpg": losses.reinforce(new, None, advantages),
        "reinforce": losses.reinforce(new, ratio, advantages),
        "dppo_tv": losses.dppo(
            new, old, ratio, advantages, losses.binary_tv(new, old), LOW, HIGH, 3.0
        ),
        "dppo_kl": losses.dppo(
            new, old, ratio, advantages, losses.binary_kl(new, old), LOW, HIGH, None
        ),
        "dro": losses.dro(new, old, advantages, 0.5),
        "plain": losses.plain_surrogate(ratio, advantages),
    }


NAMES = tuple(every_loss(*inputs()))


def test_the_clipped_surrogate_by_hand():
    # ratio, advantage -> loss: inside; above with A > 0; below with A < 0; far above with A < 0
    ratio = torch.tensor([1.1, 2.0, 0.5, 5.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    loss, clipped, bounded = losses.clipped_surrogate(ratio, advantages, LOW, HIGH, 3.0)
    torch.testing.assert_close(loss, torch.tensor([-1.1, -1.3, 0.8, 3.0, -0.5]))
    assert clipped.tolist() == [0, 1, 1, 0, 0]
    assert bounded.tolist() == [0, 0, 0, 1, 0]
    free, _, _ = losses.clipped_surrogate(ratio, advantages, LOW, HIGH, None)
    assert free[3] == 5.0


def test_gspo_takes_one_ratio_per_sequence():
    new = torch.tensor([-1.0, -1.0, -2.0])
    old = torch.tensor([-1.2, -1.4, -2.0])  # sequence 0: mean 0.3; sequence 1: 0
    advantages = torch.tensor([1.0, -1.0, 2.0])
    cu_seqlens = torch.tensor([0, 2, 3])
    loss, clipped, _ = losses.gspo(new, old, advantages, torch.ones(3), cu_seqlens, 0.2, 0.2)
    # A > 0 is clipped at 1.2, A < 0 is not: exp(0.3)
    torch.testing.assert_close(loss, torch.tensor([-1.2, math.exp(0.3), -2.0]))
    assert clipped.tolist() == [1, 0, 0]


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.9, -0.7])  # d = 0.9, -0.3
    loss, _, _ = losses.gmpo(new, old, torch.ones(2), torch.ones(2), torch.tensor([0, 2]), 0.4, 0.4)
    # A > 0: min(d, clip d) = 0.4, -0.3; mean 0.05
    torch.testing.assert_close(loss, torch.full((2,), -math.exp(0.05)))
    loss, _, _ = losses.gmpo(
        new, old, -torch.ones(2), torch.ones(2), torch.tensor([0, 2]), 0.4, 0.2
    )
    # A < 0: max(d, clip d) = 0.9, -0.3; mean 0.3
    torch.testing.assert_close(loss, torch.full((2,), math.exp(0.3)))


def test_cispo_weights_the_log_probability_by_the_clipped_ratio():
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    ratio, _ = losses.importance_ratio(new, torch.tensor([-2.0, -1.0]))
    loss, clipped, _ = losses.cispo(new, ratio, torch.tensor([2.0, 2.0]), LOW, HIGH)
    torch.testing.assert_close(loss.detach(), torch.tensor([2.6, 2.0]))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([-2.6, -2.0]))  # no token is dropped
    assert clipped.tolist() == [1, 0]


def test_dis_is_the_papers_masked_policy_gradient():
    # each side with either sign of A, both borders (a region that is open), and inside
    low, high = 0.3, 5.0
    ratios = [0.2, 0.2, 0.7, 0.71, 1.0, 3.0, 5.9, 6.0, 9.0, 9.0]
    advantages = [1.0, -1.0, 1.0, -2.0, 0.5, 1.5, -1.0, 1.0, 1.0, -1.0]
    new = torch.linspace(-2.0, -0.1, len(ratios), dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor(ratios, dtype=torch.float64) * (new - new.detach()).exp()
    loss, masked, none = losses.dis(new, ratio, torch.tensor(advantages).double(), low, high)
    kept = [r if 1 - low < r < 1 + high else 0.0 for r in ratios]
    want = [-f * a * x for f, a, x in zip(kept, advantages, new.tolist())]
    assert loss.tolist() == pytest.approx(want, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == pytest.approx([-f * a for f, a in zip(kept, advantages)], abs=1e-12)
    assert masked.tolist() == [float(f == 0) for f in kept]
    assert not none.any()
    below, above = losses.outside_trust_region(ratio, low, high)
    assert below.tolist() == [r <= 0.7 for r in ratios]
    assert above.tolist() == [r >= 6.0 for r in ratios]


def test_sapo_by_hand():
    loss, _, _ = losses.sapo(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]), 1.0, 2.0)
    torch.testing.assert_close(loss, torch.tensor([-2.0, 1.0]))  # (4 / tau) / 2


def test_covariance_losses_act_on_the_selected_tokens():
    ratio, advantages = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    selected = torch.tensor([0.0, 1.0])
    loss, clipped, _ = losses.clip_cov(ratio, advantages, selected, LOW, HIGH)
    assert loss.tolist() == [-1.0, 0.0]
    assert clipped.tolist() == [0.0, 1.0]
    loss, _, _ = losses.kl_cov(ratio, ratio.log(), advantages, selected, 0.5)
    torch.testing.assert_close(loss, torch.tensor([-1.0, -2.0 + 0.5 * math.log(2)]))


STOPPED = ("gspo", "cispo", "dis", "reinforce", "dppo_tv", "dppo_kl")
"""Losses that stop a gradient on purpose; theirs are worked out by hand, or recorded."""


@pytest.mark.parametrize("name", [n for n in NAMES if n not in STOPPED])
def test_gradients_equal_finite_differences(name):
    new, old, advantages, mask = inputs(spread=0.15)
    selected = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.float64)

    def token_losses(logprobs):
        return every_loss(logprobs, old, advantages, mask, selected)[name][0]

    assert torch.autograd.gradcheck(token_losses, new.requires_grad_())


def test_gspo_gradient_is_the_sequence_ratio_times_the_token_score():
    new = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.0], dtype=torch.float64)
    loss, _, _ = losses.gspo(
        new, old, torch.ones(2), torch.ones(2).double(), torch.tensor([0, 2]), 0.2, 0.2
    )
    loss.sum().backward()
    torch.testing.assert_close(new.grad, torch.full((2,), -math.exp(0.05)).double())


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    _, old, advantages, _ = inputs()
    mask = torch.ones(6, dtype=torch.float64)
    # gmpo speaks of sequences: one advantage for each
    advantages = torch.repeat_interleave(advantages[:3], CU.diff())
    new = old.clone().requires_grad_()
    token_losses = every_loss(new, old, advantages, mask)[name][0]
    (gradient,) = torch.autograd.grad(token_losses.sum(), new)
    torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_log_ratios_stay_finite(name, gap):
    _, old, advantages, mask = inputs()
    new = (old + gap).requires_grad_()
    loss = every_loss(new, old, advantages, mask, mask)[name][0]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("name", NAMES)
def test_sequences_without_a_masked_token_stay_finite(name):
    new, old, advantages, mask = inputs()
    new.requires_grad_()
    loss = every_loss(new, old, advantages, torch.zeros_like(mask))[name][0]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


def test_covariance_by_hand_and_its_selections():
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -9.0])
    advantages = torch.tensor([2.0, 0.0, -2.0, 9.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    cu_seqlens = torch.tensor([0, 2, 4])

    def tokens(inside):
        return MiniBatchTokens(inside, cu_seqlens, torch.tensor([0, 1]))

    everything, nothing = tokens(mask), tokens(mask * 0)
    cov = covariance(logprobs, advantages, mask, cu_seqlens)
    assert cov.tolist() == [2.0, 0.0, 2.0, 0.0]
    largest_first = cov + torch.tensor([0.1, 0, 0, 9])
    assert covariance_top(largest_first, everything, 0.34).tolist() == [1, 0, 0, 0]
    assert covariance_top(cov, everything, 0.34).tolist() == [1, 0, 0, 0], "of equal ones the first"
    assert covariance_top(cov, everything, 0.0).sum() == 0
    assert covariance_top(cov, nothing, 0.5).sum() == 0
    band = covariance_band(cov, everything, 1.0, 1.0, 5.0, seed=0)
    assert band.tolist() == [1, 0, 1, 0]
    assert covariance_band(cov, everything, 0.4, 1.0, 5.0, seed=0).sum() == 1
    assert covariance_band(cov, everything, 0.4, 3.0, 5.0, seed=0).sum() == 0


def test_the_value_loss_by_hand():
    values = torch.tensor([1.0, 1.0, 3.0])
    old = torch.tensor([0.0, 1.0, 0.0])
    returns = torch.tensor([2.0, 2.0, 0.0])
    loss, clipped = value_loss(values, old, returns, 0.5)
    # 0: clipped value 0.5, error 1.5^2 > 1; 1: unclipped; 2: clipped value 0.5, but 3^2 is larger
    torch.testing.assert_close(loss, torch.tensor([1.125, 0.5, 4.5]))
    assert clipped.tolist() == [1, 0, 0]
    free, clipped = value_loss(values, old, returns, None)
    torch.testing.assert_close(free, torch.tensor([0.5, 0.5, 4.5]))
    assert clipped.sum() == 0


def test_the_value_loss_gradient_equals_finite_differences():
    generator = torch.Generator().manual_seed(3)
    values, old, returns = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    for cliprange in (0.2, None):
        assert torch.autograd.gradcheck(
            lambda v, cliprange=cliprange: value_loss(v, old, returns, cliprange)[0], values
        )
