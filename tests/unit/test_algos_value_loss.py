"""The cross-entropy critic against the definition of Farebrother et al. 2024, in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from random_outputs import outputs_of

from mppo.algos.value_loss import bin_edges, expected_value, hl_gauss_loss, hl_gauss_target
from mppo.batch.head_outputs import ValueOutputs
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.roles import CriticConfig, HLGaussConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.targets import select_targets, value_targets
from mppo.trainer.update.objectives import ValueObjective

CASES = [(0.0, 1.0, 51, 0.75), (-2.0, 3.0, 7, 0.75), (0.0, 1.0, 2, 0.1), (-1.0, 1.0, 101, 2.0)]


def of_paper(target: float, low: float, high: float, bins: int, sigma: float) -> list[float]:
    """``hl_gauss_transform`` of the paper's appendix: a target's probability of every bin."""
    support = [low + (high - low) * i / bins for i in range(bins + 1)]
    cdf = [math.erf((edge - target) / (math.sqrt(2) * sigma)) for edge in support]
    return [(b - a) / (cdf[-1] - cdf[0]) for a, b in pairwise(cdf)]


@pytest.mark.parametrize(("low", "high", "bins", "ratio"), CASES)
def test_target_loss_value_and_gradient_are_those_of_the_paper(low, high, bins, ratio):
    generator = torch.Generator().manual_seed(bins)
    sigma, edges = ratio * (high - low) / bins, bin_edges(low, high, bins)
    drawn = torch.rand(9, generator=generator, dtype=torch.float64)
    returns = torch.cat([low + (high - low) * drawn, torch.tensor([low, high])])
    logits = torch.randn(bins, len(returns), generator=generator, requires_grad=True)
    targets = [of_paper(y, low, high, bins, sigma) for y in returns.tolist()]
    found = hl_gauss_target(returns, edges, sigma)
    torch.testing.assert_close(found, torch.tensor(targets).T, atol=1e-6, rtol=1e-6)
    loss, outside = hl_gauss_loss(logits, returns.float(), edges, sigma)
    values = expected_value(logits.T, edges)
    for t, target in enumerate(targets):
        column = [math.exp(x) for x in logits[:, t].tolist()]
        probabilities = [x / sum(column) for x in column]
        entropy = -sum(p * math.log(q) for p, q in zip(target, probabilities))
        assert loss[t].item() == pytest.approx(entropy, rel=1e-5, abs=1e-6)
        centres = [low + (high - low) * (k + 0.5) / bins for k in range(bins)]
        mean = sum(q * c for q, c in zip(probabilities, centres))
        assert values[t].item() == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert not outside.any()
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    expected = torch.softmax(logits.detach(), 0) - torch.tensor(targets).T
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_returns_outside_the_range_are_learnt_as_its_ends_and_counted():
    edges = bin_edges(0.0, 1.0, 5)
    logits = torch.zeros(5, 4)
    returns = torch.tensor([-9.0, 0.0, 1.0, 1e4])
    loss, outside = hl_gauss_loss(logits, returns, edges, 0.15)
    assert outside.tolist() == [1, 0, 0, 1]
    target = hl_gauss_target(returns, edges, 0.15)
    assert torch.equal(target[:, 0], target[:, 1])
    assert torch.equal(target[:, 2], target[:, 3])
    assert loss.tolist() == pytest.approx([math.log(5)] * 4)
    torch.testing.assert_close(target.sum(0), torch.ones(4))


def test_a_perfect_histogram_has_the_value_of_the_return():
    edges = bin_edges(0.0, 1.0, 51)
    returns = torch.tensor([0.2, 0.5, 0.77])
    target = hl_gauss_target(returns, edges, 0.75 / 51)
    torch.testing.assert_close(expected_value(target.log().T, edges), returns, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_do_not_depend_on_micro_batches(mode):
    critic = CriticConfig(
        value_loss="hl_gauss",
        hl_gauss=HLGaussConfig(bins=11, min=-1.0, max=2.0),
        loss_agg_mode=mode,
        value_loss_coef=0.5,
    )
    outputs = outputs_of([3, 1, 4, 2], seed=3)
    experience = estimate(outputs, AlgorithmConfig(lam_value=1.0), 0.0)
    targets = value_targets(experience, range(4), critic, max_response_length=5)
    generator = torch.Generator().manual_seed(0)
    tokens = len(outputs.batch.tokens_T)
    logits = torch.randn(11, tokens, generator=generator, requires_grad=True)
    results = []
    for micro_batches in ([(0, 1, 2, 3)], [(2, 0), (1,), (3,)]):
        total, sums = torch.zeros(()), {}
        for indices in micro_batches:
            bounds = outputs.batch.cu_seqlens
            where = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices])
            parts = ValueOutputs(torch.zeros(len(where)), logits[:, where])
            loss, stats = ValueObjective(targets, (0, 1, 2, 3), critic)(parts, indices)
            assert set(stats) == set(ValueObjective(targets, (), critic).statistics)
            total = total + loss
            sums = {name: sums.get(name, 0.0) + value.item() for name, value in stats.items()}
        results.append((total.item(), sums, torch.autograd.grad(total, logits)[0]))
    (loss, stats, gradient), (other, others, gradients) = results
    assert loss == pytest.approx(other, rel=1e-6)
    assert stats == pytest.approx(others, rel=1e-6)
    torch.testing.assert_close(gradient, gradients, atol=1e-7, rtol=1e-5)
    weight = select_targets(targets, [0, 1, 2, 3]).weight_T
    sigma, edges = 0.75 * 3 / 11, bin_edges(-1.0, 2.0, 11)
    by_hand, _ = hl_gauss_loss(logits, targets.returns_T, edges, sigma)
    assert loss == pytest.approx(0.5 * (weight * by_hand).sum().item(), rel=1e-6)
    outside = (targets.returns_T < -1) | (targets.returns_T > 2)
    share = (targets.metric_weight_T * outside).sum().item()
    assert stats["critic/vf_outside_range"] == pytest.approx(share)
    with pytest.raises(AssertionError, match="has logits"):
        ValueObjective(targets, (0, 1, 2, 3), critic)(ValueOutputs(torch.zeros(tokens)), range(4))
