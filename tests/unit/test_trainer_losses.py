"""Losses and statistics of a mini-batch do not depend on micro-batches, order or padding."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_batch_objectives import policy_objective, value_objective

from mppo import register
from mppo.algos.token_axis import select_sequences
from mppo.batch.batch import Batch
from mppo.batch.head_outputs import PolicyOutputs
from mppo.batch.outputs import Experience, Outputs
from mppo.recipe.sections.algorithm import RolloutCorrectionConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig, LossAggMode, PolicyLossConfig
from mppo.trainer import targets as mini_batch_targets
from mppo.trainer.metrics import update_metrics
from mppo.trainer.targets import select_targets
from mppo.trainer.update.objectives import PolicyObjective

LIMIT = 10
policy_targets = partial(mini_batch_targets.policy_targets, max_response_length=LIMIT)
value_targets = partial(mini_batch_targets.value_targets, max_response_length=LIMIT)
LOSS_MODES = register.policy_loss.own
AGGREGATIONS = LossAggMode.__args__
WEIGHED = RolloutCorrectionConfig(bypass_mode=True, rollout_is="sequence")
"""What the loss ``reinforce`` reads; the others do not."""


def experience_of(lengths, seed=0, prompt=2, rejected=()):
    """Sequences of a prompt of two tokens and a response; log-probabilities and values random."""
    generator = torch.Generator().manual_seed(seed)
    total_lengths = [prompt + n for n in lengths]
    cu_seqlens = torch.tensor([0, *total_lengths]).cumsum(0)
    mask = torch.cat([torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths])

    def random():
        return torch.randn(len(mask), generator=generator) * mask

    count = len(lengths)
    logprobs = -random().abs()
    batch = Batch(
        tokens_T=torch.zeros(len(mask), dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        response_mask_T=mask,
        rollout_logprobs_T=logprobs,
        group_B=torch.arange(count) // 2,
        scores_B=torch.randn(count, generator=generator),
        truncated_B=torch.zeros(count, dtype=torch.bool),
        weight_version_T=torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64),
    )
    outputs = Outputs(batch, logprobs, -random().abs(), random())
    weight = mask * torch.rand(len(mask), generator=generator)
    for index in rejected:
        weight[cu_seqlens[index] : cu_seqlens[index + 1]] = 0.0
    return Experience(outputs, random(), random(), random(), weight)


def actor_of(loss_mode="vanilla", loss_agg_mode="token-mean", **kwargs):
    loss = PolicyLossConfig(
        loss_mode=loss_mode, clip_cov_lb=-9.0, clip_cov_ratio=0.3, kl_cov_ratio=0.3, dro_beta=0.5
    )
    return ActorConfig(policy_loss=loss, loss_agg_mode=loss_agg_mode, **kwargs)


def evaluate(targets, actor, cuts, logprobs, entropy):
    """Loss, statistics and gradient, summed over the cuts."""
    logprobs = logprobs.clone().requires_grad_()
    total, sums = torch.zeros(()), {}
    sequences = (14, 10, 11, 12, 13)  # indices of the mini-batch's sequences in the batch
    objective = PolicyObjective(targets, sequences, actor, WEIGHED)
    for cut in cuts:
        outputs = PolicyOutputs(
            select_sequences(logprobs, targets.cu_seqlens, cut),
            select_sequences(entropy, targets.cu_seqlens, cut),
        )
        loss, stats = objective(outputs, [sequences[place] for place in cut])
        total = total + loss
        sums = {name: sums.get(name, 0) + value for name, value in stats.items()}
    total.backward()
    return total.detach(), sums, logprobs.grad


@pytest.mark.parametrize("loss_agg_mode", AGGREGATIONS)
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_micro_batches_do_not_change_loss_gradient_and_statistics(loss_mode, loss_agg_mode):
    experience = experience_of([3, 0, 5, 1, 4], rejected=[3])
    actor = actor_of(
        loss_mode, loss_agg_mode, use_kl_loss=True, entropy_coeff=0.01, positive_nll_coef=0.1
    )
    targets = policy_targets(experience, [4, 0, 1, 2, 3], actor)
    generator = torch.Generator().manual_seed(9)
    logprobs = -torch.rand(len(targets.mask_T), generator=generator)
    entropy = torch.rand(len(targets.mask_T), generator=generator)
    complete = evaluate(targets, actor, [range(5)], logprobs, entropy)
    parts = evaluate(targets, actor, [[3, 1], [2], [], [0, 4]], logprobs, entropy)
    torch.testing.assert_close(parts[0], complete[0])
    torch.testing.assert_close(parts[2], complete[2])
    for name in complete[1]:
        torch.testing.assert_close(parts[1][name], complete[1][name], msg=name)


def test_a_micro_batch_without_a_trained_token_keeps_its_graph():
    experience = experience_of([2, 3], rejected=[0, 1])
    actor = actor_of()
    targets = policy_targets(experience, [0, 1], actor)
    logprobs = torch.randn(len(targets.mask_T), requires_grad=True)
    loss, stats = policy_objective(logprobs, logprobs.detach(), targets, actor)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.abs().sum() == 0.0
    assert all(math.isfinite(value) for value in stats.values())


def test_masked_tokens_do_not_count_not_even_nan():
    experience = experience_of([2, 3])
    actor = actor_of(use_kl_loss=True, entropy_coeff=0.1)
    targets = policy_targets(experience, [0, 1], actor)
    outside = targets.mask_T == 0
    clean = torch.where(outside, 0.0, -0.7)
    dirty = torch.where(outside, math.nan, -0.7).requires_grad_()
    expected, _ = policy_objective(clean, clean.abs(), targets, actor)
    actual, _ = policy_objective(dirty, dirty.detach().abs(), targets, actor)
    actual.backward()
    torch.testing.assert_close(actual.detach(), expected)
    assert torch.isfinite(dirty.grad).all()


def test_the_policy_loss_by_hand():
    # one response of two tokens; old log-probabilities as now: ratio 1
    experience = experience_of([2])
    targets = policy_targets(experience, [0], actor_of())
    _, stats = policy_objective(
        targets.old_logprobs_T, torch.ones(4), targets, actor_of(entropy_coeff=0.5)
    )
    advantages, weights = experience.advantages_T[2:], experience.loss_weight_T[2:]
    expected = -(advantages * weights).sum() / 2
    torch.testing.assert_close(stats["actor/pg_loss"], expected)
    assert stats["actor/ppo_kl"] == 0.0
    assert stats["val/ratio"] == 1.0
    assert stats["actor/pg_clipfrac"] == 0.0
    assert stats["actor/entropy"] == 1.0


def test_importance_weights_do_not_change_entropy_or_kl_loss():
    experience = experience_of([3, 2])
    actor = actor_of(use_kl_loss=True, kl_loss_type="k2")
    targets = policy_targets(experience, [0, 1], actor)
    _, stats = policy_objective(targets.old_logprobs_T, torch.ones(9), targets, actor)
    gap = (targets.old_logprobs_T - targets.ref_logprobs_T).square() / 2
    torch.testing.assert_close(stats["actor/kl_loss"], gap.sum() / 5)
    torch.testing.assert_close(stats["actor/entropy"], torch.tensor(1.0))


def test_rejected_sequences_do_not_count_in_the_normaliser():
    kept = experience_of([3, 2, 4], seed=4)
    rejected = experience_of([3, 2, 4], seed=4, rejected=[1])
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        actor = actor_of(loss_agg_mode=mode)
        without = policy_targets(kept, [0, 2], actor)
        masked = policy_targets(rejected, [0, 1, 2], actor)
        torch.testing.assert_close(select_targets(masked, [0, 2]).weight_T, without.weight_T)


def test_the_likelihood_of_positive_examples_is_vapos():
    # -1 / sum_i |o_i| sum_i sum_t log pi over the responses with a positive score (VAPO)
    experience = experience_of([3, 2, 4, 5], seed=2, rejected=[3])
    scores = torch.tensor([1.0, -1.0, 0.5, 2.0])
    batch = replace(experience.old.batch, scores_B=scores)
    experience = replace(experience, old=replace(experience.old, batch=batch))
    order, positive = [3, 2, 1, 0], [0, 2]
    plain, added = actor_of(), actor_of(positive_nll_coef=0.1)
    targets = policy_targets(experience, order, added)
    logprobs = (targets.old_logprobs_T - 0.3).requires_grad_()
    without, _ = policy_objective(logprobs, logprobs.detach(), targets, plain)
    loss, stats = policy_objective(logprobs, logprobs.detach(), targets, added)
    parts = [select_sequences(logprobs, targets.cu_seqlens, [order.index(i)]) for i in positive]
    nll = -sum(part[2:].sum() for part in parts) / (3 + 4)
    torch.testing.assert_close(stats["actor/positive_nll"], nll.detach(), atol=1e-6, rtol=1e-6)
    ours, theirs = (
        torch.autograd.grad(each, logprobs, retain_graph=True)[0]
        for each in (loss, without + 0.1 * nll)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    negative = replace(experience.old.batch, scores_B=-scores.abs())
    none = replace(experience, old=replace(experience.old, batch=negative))
    assert policy_targets(none, order, added).positive_weight_T.count_nonzero() == 0


def test_full_kl_reaches_the_loss():
    experience = experience_of([3])
    actor = actor_of(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=2.0)
    targets = policy_targets(experience, [0], actor)
    arguments = (targets.old_logprobs_T, torch.zeros(5), targets, actor)
    loss, stats = policy_objective(*arguments, full_kl_T=torch.full((5,), 0.25))
    assert stats["actor/kl_loss"] == 0.25
    torch.testing.assert_close(loss, stats["actor/pg_loss"] + 0.5)
    with pytest.raises(ValueError, match="full_kl_T"):
        policy_objective(*arguments)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.randoms())
def test_order_of_sequences_changes_nothing(lengths, random):
    experience = experience_of(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    actor, critic = actor_of("gspo", use_kl_loss=True), CriticConfig()
    results = []
    for indices in (range(len(lengths)), order):
        targets = policy_targets(experience, indices, actor)
        loss, _ = policy_objective(
            targets.old_logprobs_T + 0.1, targets.old_logprobs_T.abs(), targets, actor
        )
        values = value_targets(experience, indices, critic)
        value_loss, _ = value_objective(values.old_values_T + 0.3, values, critic)
        results.append(torch.stack([loss, value_loss]))
    torch.testing.assert_close(results[0], results[1])


def test_the_value_objective_by_hand_and_over_micro_batches():
    experience = experience_of([2, 1])
    critic = CriticConfig(cliprange_value=None, value_loss_coef=0.1)
    targets = value_targets(experience, [0, 1], critic)
    values = torch.where(targets.mask_T > 0, 1.0, math.nan)
    loss, stats = value_objective(values, targets, critic)
    errors = (1.0 - experience.returns_T)[targets.mask_T > 0].square() / 2
    torch.testing.assert_close(stats["critic/vf_loss"], errors.mean())
    torch.testing.assert_close(loss, 0.1 * errors.mean())
    assert stats["critic/vpred_mean"].item() == pytest.approx(1.0)
    parts = [
        value_objective(torch.ones(3 + (i == 0)), select_targets(targets, [i]), critic)[0]
        for i in range(2)
    ]
    torch.testing.assert_close(sum(parts), loss)


def test_covariance_selection_covers_the_complete_mini_batch():
    experience = experience_of([30, 30])
    for mode in ("clip_cov", "kl_cov"):
        targets = policy_targets(experience, [0, 1], actor_of(mode))
        assert targets.selected_T.sum() == 18  # 0.3 of 60 tokens, not of each micro-batch


def test_update_metrics_average_over_mini_batches():
    assert update_metrics([]) == {}
    metrics = update_metrics([{"val/ratio": 1.0, "x": 2.0}, {"val/ratio": 2.0, "x": 4.0}])
    assert metrics == {"val/ratio": 1.5, "x": 3.0, "val/ratio_var": 0.5}
    assert update_metrics([{"val/ratio": 1.0}])["val/ratio_var"] == 0.0
    losses = [{"critic/vf_loss": loss} for loss in (4.0, 2.0, 1.0, 2.0)]
    assert update_metrics(losses, epochs=2) == {
        "critic/vf_loss": 2.25, "critic/vf_loss_first": 3.0, "critic/vf_loss_last": 1.5,
    }  # fmt: skip


def one_token(advantage, gap):
    """A response of one token, its advantage, and log-probabilities ``gap`` above the old ones."""
    experience = experience_of([1])
    targets = policy_targets(experience, [0], actor_of())
    inside = targets.mask_T
    targets = replace(targets, advantages_T=advantage * inside, importance_T=inside)
    return targets.old_logprobs_T + gap * inside, targets


@pytest.mark.parametrize(
    ("settings", "ratio", "advantage", "loss"),
    [
        ({}, 1.5, 1.0, -1.2),
        ({}, 0.5, -1.0, 0.8),
        # clip-higher
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, 1.5, 1.0, -1.3),
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, 0.5, -1.0, 0.9),
        ({"clip_ratio": 0.4}, 1.5, 1.0, -1.4),
        # dual clip
        ({}, 5.0, -1.0, 3.0),
        ({"clip_ratio_c": 4.0}, 5.0, -1.0, 4.0),
        ({"clip_ratio_c": None}, 5.0, -1.0, 5.0),
    ],
)
def test_the_recipes_clip_ranges_by_hand(settings, ratio, advantage, loss):
    logprobs, targets = one_token(advantage, math.log(ratio))
    _, stats = policy_objective(logprobs, logprobs.abs(), targets, ActorConfig(**settings))
    assert stats["actor/pg_loss"].item() == pytest.approx(loss, rel=1e-5)


def test_entropy_is_rewarded_and_kl_punished_by_their_coefficients():
    actor = ActorConfig(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=0.25, kl_loss_type="k2")
    logprobs, targets = one_token(2.0, 0.0)
    inside = targets.mask_T
    targets = replace(targets, ref_logprobs_T=logprobs - 2.0 * inside)
    loss, stats = policy_objective(logprobs, 3.0 * inside, targets, actor)
    # -A r = -2; entropy 3; d = 2, d^2 / 2 = 2
    assert loss.item() == pytest.approx(-2.0 - 0.5 * 3.0 + 0.25 * 2.0)
    assert stats["actor/entropy"].item() == pytest.approx(3.0)
    assert stats["actor/kl_loss"].item() == pytest.approx(2.0)


def test_the_scale_of_seq_mean_token_sum_norm():
    experience = experience_of([1, 4, 2])
    mode = "seq-mean-token-sum-norm"
    stated = policy_targets(experience, [0, 2], actor_of("vanilla", mode, loss_scale_factor=8.0))
    torch.testing.assert_close(stated.weight_T, stated.mask_T / (2 * 8))
    # without one: the recipe's response length, however long the batch's responses are
    actor, critic = actor_of("vanilla", mode), CriticConfig(loss_agg_mode=mode)
    constant = policy_targets(experience, [0, 2], actor)
    torch.testing.assert_close(constant.weight_T, constant.mask_T / (2 * LIMIT))
    values = value_targets(experience, [0, 2], critic)
    torch.testing.assert_close(values.weight_T, values.mask_T / (2 * LIMIT))


def test_gmpo_weighs_a_sequence_by_the_geometric_mean_of_its_tokens_weights():
    # log-ratios 0.1, 0.3 and (rejected) 5; weights 0.5, 2 and 0: geometric mean 1, not 1.25
    experience = experience_of([3, 1])
    mask = experience.old.batch.response_mask_T
    weight = mask.clone()
    weight[2:5] = torch.tensor([0.5, 2.0, 0.0])
    weight[7] = 4.0
    advantages = mask * torch.tensor([0, 0, 3.0, 3.0, 3.0, 0, 0, -2.0])
    experience = replace(experience, loss_weight_T=weight, advantages_T=advantages)
    actor = actor_of("gmpo", clip_ratio=0.4)
    targets = policy_targets(experience, [0, 1], actor)
    new = targets.old_logprobs_T + torch.tensor([0, 0, 0.1, 0.3, 5.0, 0, 0, 0.2])
    loss, stats = policy_objective(new, torch.zeros(8), targets, actor)
    # mean over the two sequences of -A exp(mean d) exp(mean log w)
    expected = (-3 * math.exp(0.2) * 1.0 + 2 * math.exp(0.2) * 4.0) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert stats["actor/pg_loss"].item() == pytest.approx(expected, rel=1e-6)
