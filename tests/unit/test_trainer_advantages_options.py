"""Estimators, whitening and lambdas set by a recipe, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mppo import register
from mppo.algos.masked import merged_moments, sequence_moments
from mppo.batch.batch import Batch
from mppo.batch.outputs import Outputs
from mppo.batch.selection import select_outputs
from mppo.recipe.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics, explained_variance

ESTIMATORS = register.estimator.own
HALF = 0.5**0.5


def outputs_of(lengths, scores, prompt=1, seed=None):
    """Two responses per prompt of ``prompt`` tokens; all outputs are 0, or random by ``seed``."""
    masks = [torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths]
    mask = torch.cat(masks)
    inside = mask > 0
    generator = torch.Generator().manual_seed(seed or 0)

    def drawn():
        x = torch.zeros_like(mask)
        numbers = torch.randn(int(mask.sum()), generator=generator)
        x[inside] = numbers if seed is not None else torch.zeros_like(numbers)
        return x

    batch = Batch(
        tokens_T=torch.zeros(len(mask), dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *(len(m) for m in masks)]).cumsum(0),
        response_mask_T=mask,
        rollout_logprobs_T=drawn(),
        group_B=torch.arange(len(lengths)) // 2,
        scores_B=torch.tensor(scores),
        truncated_B=torch.zeros(len(lengths), dtype=torch.bool),
        weight_version_T=torch.zeros(len(mask), dtype=torch.int64),
        parts_B=torch.tensor(scores)[:, None],
    )
    return Outputs(batch, drawn(), drawn(), drawn())


def of_responses(x_T, outputs):
    """The numbers of each response's tokens."""
    batch = outputs.batch
    spans = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist())
    return [x_T[a:b][batch.response_mask_T[a:b] > 0].tolist() for a, b in spans]


BY_HAND = {
    # scores 1, 3 | 5, 9 of responses of 2, 1 | 1, 3 tokens; values 0, gamma 1
    "gae": [1, 3, 5, 9],
    "reinforce_plus_plus": [1, 3, 5, 9],
    # group means 2 and 7, unbiased deviations sqrt 2 and 2 sqrt 2
    "grpo": [-HALF, HALF, -HALF, HALF],
    "gdpo": [-HALF, HALF, -HALF, HALF],  # of one part, the score
    # the best one's lead, 2 and 4, by these deviations
    "grpo_passk": [0, 2 * HALF, 0, 2 * HALF],
    "dr_grpo": [-1, 1, -2, 2],
    "reinforce_plus_plus_baseline": [-1, 1, -2, 2],
    # less the other one's score
    "rloo": [-2, 2, -4, 4],
    "rloo_vectorized": [-2, 2, -4, 4],
    # less the greedy response's: 0, 4, 5, 10
    "remax": [1, -1, 0, -1],
    # baselines (2 + 3) / 3 and (5 + 27) / 4
    "opo": [-2 / 3, 4 / 3, -3, 1],
    # no score is 0: alpha 1; f_norm 2
    "gpg": [-0.5, 0.5, -1, 1],
    # baselines 2 and 7 of equal weights; none past the end of the other response
    "optimal_token_baseline": [[-1, 1], 1, -2, [2, 9, 9]],
    "tir_optimal_token_baseline": [[-1, 1], 1, -2, [2, 9, 9]],
}
"""The advantage of each response's tokens."""


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_by_hand(estimator):
    lengths = [2, 1, 1, 3]
    outputs = outputs_of(lengths, [1.0, 3.0, 5.0, 9.0])
    algorithm = AlgorithmConfig(adv_estimator=estimator, whiten_advantages=False, f_norm=2.0)
    greedy = torch.tensor([0.0, 4.0, 5.0, 10.0])
    experience = estimate(outputs, algorithm, 0.0, baseline_scores_B=greedy)
    rows = of_responses(experience.advantages_T, outputs)
    for row, n, value in zip(rows, lengths, BY_HAND[estimator], strict=True):
        expected = value if isinstance(value, list) else [value] * n
        assert row == pytest.approx(expected, abs=2e-6)
    assert not experience.advantages_T[outputs.batch.response_mask_T == 0].any()


def advantages(outputs, **kwargs):
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", **kwargs)
    rows = of_responses(estimate(outputs, algorithm, 0.0).advantages_T, outputs)
    return [x for row in rows for x in row]


def test_whitening_over_the_batch_or_over_each_group_by_hand():
    three = outputs_of([1, 1, 1], [1.0, 2.0, 3.0])
    assert advantages(three) == pytest.approx([-1, 0, 1])
    biased = math.sqrt(1.5)
    assert advantages(three, whiten_unbiased=False) == pytest.approx([-biased, 0, biased])
    assert advantages(three, whiten_advantages=False) == [1, 2, 3]
    four = outputs_of([1, 1, 1, 1], [1.0, 3.0, 5.0, 9.0])
    grouped = advantages(four, whiten_over="group")
    assert grouped == pytest.approx([-HALF, HALF, -HALF, HALF])
    # over the batch: mean 4.5, variance (12.25 + 2.25 + .25 + 20.25) / 3
    over_all = [x / math.sqrt(35 / 3) for x in (-3.5, -1.5, 0.5, 4.5)]
    assert advantages(four) == pytest.approx(over_all)


def test_a_length_adaptive_lambda_by_hand():
    # four tokens, alpha 0.5: lambda 1 - 1 / 2; the score 4 is on the last
    outputs = outputs_of([4], [4.0])
    algorithm = AlgorithmConfig(lam_length_adaptive_alpha=0.5, whiten_advantages=False)
    experience = estimate(outputs, algorithm, 0.0)
    assert of_responses(experience.advantages_T, outputs) == [[0.5, 1.0, 2.0, 4.0]]
    assert of_responses(experience.returns_T, outputs) == [[0.5, 1.0, 2.0, 4.0]]
    both = algorithm.model_copy(update={"lam_value": 1.0})
    experience = estimate(outputs, both, 0.0)
    assert of_responses(experience.advantages_T, outputs) == [[0.5, 1.0, 2.0, 4.0]]
    assert of_responses(experience.returns_T, outputs) == [[4.0] * 4]


OPTIONS = {
    "use_kl_in_reward": True,
    "whiten_rewards": True,
    "whiten_advantages": True,
    "rollout_correction": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="seq_mean_k1"
    ),
}


@pytest.mark.parametrize("whiten_over", ["batch", "group"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_neither_order_nor_prompts_change_an_estimate(estimator, whiten_over):
    algorithm = AlgorithmConfig(adv_estimator=estimator, whiten_over=whiten_over, **OPTIONS)
    lengths, scores = [2, 1, 4, 3, 0, 5], [1.0, 3.0, -2.0, 0.5, 2.0, 0.0]
    greedy = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    outputs = outputs_of(lengths, scores, seed=3)
    experience = estimate(outputs, algorithm, 0.1, baseline_scores_B=greedy)
    order = [5, 2, 0, 4, 1, 3]
    shuffled = select_outputs(outputs, order)
    again = estimate(shuffled, algorithm, 0.1, baseline_scores_B=greedy[order])
    longer = outputs_of(lengths, scores, prompt=9, seed=3)
    other = estimate(longer, algorithm, 0.1, baseline_scores_B=greedy)
    for name in ("rewards_T", "advantages_T", "returns_T", "loss_weight_T"):
        want = of_responses(getattr(experience, name), outputs)
        got = of_responses(getattr(again, name), shuffled)
        assert sum(map(len, want)) == sum(lengths)
        for place, index in enumerate(order):
            assert got[place] == pytest.approx(want[index], rel=1e-4, abs=1e-5), name
        for row, same in zip(of_responses(getattr(other, name), longer), want, strict=True):
            assert row == pytest.approx(same, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_responses_of_equal_scores_and_one_token_stay_finite_when_whitened(estimator):
    for lengths in ([1, 1, 1, 1], [0, 0], [1, 0]):
        outputs = outputs_of(lengths, [2.0] * len(lengths))
        for whiten_over in ("batch", "group"):
            algorithm = AlgorithmConfig(
                adv_estimator=estimator, whiten_over=whiten_over, whiten_advantages=True
            )
            baseline = torch.zeros(len(lengths))
            experience = estimate(outputs, algorithm, 0.0, baseline_scores_B=baseline)
            assert experience.advantages_T.abs().max() < 1e-3


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0, 99.0])
    values = torch.tensor([1.0, 2.0, 3.0, 2.0, 0.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])

    def explained(values, returns, mask):
        bounds = torch.tensor([0, len(mask)])
        errors, targets = (
            merged_moments(sequence_moments(x, mask, bounds)) for x in (returns - values, returns)
        )
        return explained_variance(errors, targets)

    # errors 0, 0, 0, 2: variance 1; returns: variance 5 / 3
    assert explained(values, returns, mask) == pytest.approx(0.4, abs=1e-5)
    # equal returns, or one token, have no variance to explain
    for equal in (1.0, 0.0, -3e4):
        assert explained(values, torch.full((5,), equal), mask) is None
    assert explained(values, torch.tensor([1.0, 1.0 + 1e-6, 1.0, 1.0, 7.0]), mask) is None
    assert explained(values, torch.tensor([1.0, 1.001, 1.0, 1.0, 7.0]), mask) is not None
    assert explained(values[:1], returns[:1], mask[:1]) is None
    assert explained(values[:0], returns[:0], mask[:0]) is None


@pytest.mark.parametrize("score", [0.0, 1.0, 1e4])
def test_a_step_of_equal_returns_has_no_explained_variance(score):
    # returns are values plus advantages: equal but for rounding
    outputs = outputs_of([900, 3, 700, 1], [score] * 4, seed=5)
    name = "critic/vf_explained_var"
    assert name not in experience_metrics(estimate(outputs, AlgorithmConfig(), 0.0))
    mixed = outputs_of([900, 3, 700, 1], [score, score, score + 1, score], seed=5)
    assert name in experience_metrics(estimate(mixed, AlgorithmConfig(), 0.0))


def test_the_kl_in_the_reward_by_hand():
    # d = log 2 on the one token
    outputs = outputs_of([1], [1.0])
    d = math.log(2.0)
    outputs = dataclasses.replace(outputs, ref_logprobs_T=torch.tensor([0.0, -d]))
    for kind, kl in {"k1": d, "abs": d, "k2": d * d / 2, "k3": 0.5 + d - 1}.items():
        algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_penalty=kind)
        rewards = estimate(outputs, algorithm, 0.5).rewards_T
        assert rewards.tolist() == pytest.approx([0.0, 1.0 - 0.5 * kl])
