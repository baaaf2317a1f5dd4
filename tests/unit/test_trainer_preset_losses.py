"""From a batch to losses: presets against their systems' formulas, and all pairs of options."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from mini_batch_objectives import policy_objective, value_objective
from random_outputs import ESTIMATORS, REJECTIONS, outputs_of

from mppo import register
from mppo.recipe.presets import apply_preset
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.algorithm import (
    AlgorithmConfig,
    RolloutCorrectionConfig,
)
from mppo.recipe.sections.roles import ActorConfig, CriticConfig, PolicyLossConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.targets import policy_targets, value_targets


def padded(x_T, outputs):
    """Responses as rows [B, R], zeros on the right."""
    batch = outputs.batch
    rows = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        inside = batch.response_mask_T[start:end] > 0
        rows.append(x_T[start:end][inside].double())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def whiten(x, mask, unbiased=True):
    n = mask.sum()
    mean = (x * mask).sum() / n
    var = ((x - mean).square() * mask).sum() / (n - (1 if unbiased else 0))
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def system_losses(name, outputs, new_logprobs, new_values):
    """Policy and value loss, as the named system computes them from one batch."""
    verl, gamma = name == "verl", 1.0
    lam = 1.0 if verl else 0.95
    mask = padded(outputs.batch.response_mask_T, outputs)
    old, ref = padded(outputs.logprobs_T, outputs), padded(outputs.ref_logprobs_T, outputs)
    values, scores = padded(outputs.values_T, outputs), outputs.batch.scores_B.double()
    beta = {"verl": 0.0, "trl": 0.05, "deepspeed_chat": 0.1, "openrlhf": 0.02}[name]
    rewards = -beta * (old - ref) * mask
    limit = {"deepspeed_chat": 5.0, "openrlhf": 10.0}.get(name, math.inf)
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(mask)), last] += scores.clamp(-limit, limit)
    advantages, running = torch.zeros_like(values), torch.zeros(len(mask)).double()
    for t in reversed(range(mask.shape[1])):
        following = values[:, t + 1] if t + 1 < mask.shape[1] else torch.zeros(len(mask))
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        running = running * mask[:, t]
        advantages[:, t] = running
    returns = advantages + values
    if name != "deepspeed_chat":
        advantages = whiten(advantages, mask, unbiased=name != "openrlhf")
    ratio = (padded(new_logprobs, outputs) - old).exp()
    pg = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    if verl:
        pg = torch.where(advantages < 0, torch.minimum(pg, -3.0 * advantages), pg)
    value_range = 0.5 if verl else 0.2
    new = padded(new_values, outputs)
    clipped = torch.clamp(new, values - value_range, values + value_range)
    vf = 0.5 * torch.maximum((new - returns).square(), (clipped - returns).square())

    def aggregate(x):
        if name == "openrlhf":
            return ((x * mask).sum(1) / mask.sum(1)).mean()
        return (x * mask).sum() / mask.sum()

    return aggregate(pg), aggregate(vf) * (0.1 if name == "trl" else 1.0)


@pytest.mark.parametrize("name", ["verl", "trl", "deepspeed_chat", "openrlhf"])
@pytest.mark.parametrize("seed", range(3))
def test_a_preset_reproduces_its_systems_losses(name, seed):
    recipe = Recipe.model_validate(apply_preset({"algorithm": {"preset": name}}))
    outputs = outputs_of([3, 7, 1, 5], seed=seed)
    scores = outputs.batch.scores_B * 8
    if recipe.reward.clip is not None:
        shaped = scores.clamp(-recipe.reward.clip, recipe.reward.clip)
    else:
        shaped = scores
    mask = outputs.batch.response_mask_T
    generator = torch.Generator().manual_seed(seed + 100)
    noise = torch.randn(2, len(mask), generator=generator) * mask
    new_logprobs = outputs.logprobs_T + 0.4 * noise[0]
    new_values = outputs.values_T + 0.6 * noise[1]
    raw = dataclasses.replace(outputs, batch=dataclasses.replace(outputs.batch, scores_B=scores))
    ours = dataclasses.replace(outputs, batch=dataclasses.replace(outputs.batch, scores_B=shaped))
    experience = estimate(ours, recipe.algorithm, recipe.algorithm.kl_ctrl.kl_coef)
    targets = policy_targets(experience, range(4), recipe.actor, 9)
    policy, _ = policy_objective(new_logprobs, noise[0].abs(), targets, recipe.actor)
    value_target = value_targets(experience, range(4), recipe.critic, 9)
    value, _ = value_objective(new_values, value_target, recipe.critic)
    expected_policy, expected_value = system_losses(name, raw, new_logprobs, new_values)
    torch.testing.assert_close(policy.double(), expected_policy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.double(), expected_value, rtol=1e-4, atol=1e-5)


def test_every_pair_of_options_estimates_and_trains_to_finite_numbers():
    losses = register.policy_loss.own
    aggregations = ActorConfig.model_fields["loss_agg_mode"].annotation.__args__
    kinds = ("k1", "abs+", "k2", "k3+")
    corrections = ("off", "token", "sequence")
    outputs = outputs_of([3, 0, 5, 1])
    for i, estimator in enumerate(ESTIMATORS):
        for j, loss_mode in enumerate(losses):
            correction = RolloutCorrectionConfig(
                rollout_is=corrections[(i + j) % 3], rollout_rs=REJECTIONS[(2 * i + j) % 14]
            )
            algorithm = AlgorithmConfig(
                adv_estimator=estimator,
                use_kl_in_reward=bool((i + j) % 2),
                kl_penalty=kinds[(i + 2 * j) % 4],
                rollout_correction=correction,
            )
            actor = ActorConfig(
                policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.1),
                loss_agg_mode=aggregations[(i + j) % 5],
                use_kl_loss=bool(j % 2),
                kl_loss_type=kinds[(i + j) % 4],
            )
            experience = estimate(outputs, algorithm, 0.1, baseline_scores_B=torch.zeros(4))
            targets = policy_targets(experience, range(4), actor, 9)
            logprobs = (targets.old_logprobs_T - 0.1).requires_grad_()
            loss, stats = policy_objective(logprobs, logprobs.detach().abs(), targets, actor)
            loss.backward()
            assert torch.isfinite(logprobs.grad).all(), (estimator, loss_mode)
            assert all(math.isfinite(value) for value in stats.values()), (estimator, loss_mode)
    values = value_targets(experience, range(4), CriticConfig(), 9)
    assert math.isfinite(value_objective(values.returns_T, values, CriticConfig())[0])
