"""From outputs batch to experience: by hand, at the edges, and against each system's own loop."""

import dataclasses
import math

import pytest
import torch
from whole_objectives import policy_objective, value_objective

from mppo.algos.reward_normalization import RewardStats
from mppo.batch import Batch, ModelOutputs
from mppo.config.algorithm import (
    AlgorithmConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
    ScoreNormalizationConfig,
)
from mppo.config.presets import apply_preset
from mppo.config.schema import ActorConfig, CriticConfig, PolicyLossConfig, Recipe
from mppo.trainer.advantages import current_kl, estimate, kl_controller, normalize_scores
from mppo.trainer.losses import policy_targets, value_targets
from mppo.trainer.metrics import experience_metrics
from mppo.trainer.selection import (
    concatenate_batches,
    first_groups,
    informative_sequences,
    resample_experience,
    select_batch,
    select_experience,
)

ESTIMATORS = AlgorithmConfig.model_fields["adv_estimator"].annotation.__args__
REJECTIONS = RolloutCorrectionConfig.model_fields["rollout_rs"].annotation.__args__


def outputs_of(lengths, scores=None, seed=0, prompt=1, samples=2):
    """Random measurements of responses of the given lengths, ``samples`` to a prompt."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    cu_seqlens = torch.tensor([0, *(prompt + n for n in lengths)]).cumsum(0)
    pieces = [torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths]
    mask = torch.cat(pieces) if pieces else torch.zeros(0)

    def random():
        return torch.randn(len(mask), generator=generator) * mask

    if scores is None:
        scores = torch.randn(count, generator=generator)
    batch = Batch(
        tokens_T=torch.arange(len(mask)),
        cu_seqlens=cu_seqlens,
        response_mask_T=mask,
        rollout_logprobs_T=-random().abs(),
        group_B=torch.arange(count) // samples,
        scores_B=torch.as_tensor(scores, dtype=torch.float32),
        truncated_B=torch.arange(count) % 2 == 1,
        weight_version_T=torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64),
    )
    return ModelOutputs(batch, -random().abs(), -random().abs(), random())


def finite(experience):
    tensors = (
        experience.rewards_T,
        experience.advantages_T,
        experience.returns_T,
        experience.loss_weight_T,
    )
    return all(torch.isfinite(tensor).all() for tensor in tensors)


def test_score_and_kl_penalty_become_token_rewards():
    outputs = outputs_of([2], scores=[3.0])
    outputs = dataclasses.replace(
        outputs,
        logprobs_T=torch.tensor([0.0, -1.0, -2.0]),
        ref_logprobs_T=torch.tensor([0.0, -1.5, -1.0]),
        values_T=torch.tensor([0.0, 1.0, 2.0]),
    )
    algorithm = AlgorithmConfig(use_kl_in_reward=True, whiten_advantages=False)
    experience = estimate(outputs, algorithm, kl_coef=0.1)
    torch.testing.assert_close(experience.rewards_T, torch.tensor([0.0, -0.05, 3.1]))
    # gamma = lam = 1: returns are rewards to go
    torch.testing.assert_close(experience.returns_T, torch.tensor([0.0, 3.05, 3.1]))
    torch.testing.assert_close(experience.advantages_T, torch.tensor([0.0, 2.05, 1.1]))
    assert experience.loss_weight_T.tolist() == [0.0, 1.0, 1.0]
    assert current_kl(outputs, algorithm) == pytest.approx((0.5 - 1.0) / 2)


def test_values_and_policy_may_have_their_own_lambda():
    outputs = outputs_of([3, 4])
    both = AlgorithmConfig(lam=0.5, lam_value=1.0, whiten_advantages=False)
    experience = estimate(outputs, both, 0.0)
    policy = estimate(outputs, both.model_copy(update={"lam_value": None}), 0.0)
    value = estimate(outputs, both.model_copy(update={"lam": 1.0}), 0.0)
    torch.testing.assert_close(experience.advantages_T, policy.advantages_T)
    torch.testing.assert_close(experience.returns_T, value.returns_T)


def test_reinforce_plus_plus_and_remax_by_hand():
    outputs = outputs_of([2, 1], scores=[4.0, 6.0])
    plain = {"gamma": 0.5, "whiten_advantages": False}
    experience = estimate(outputs, AlgorithmConfig(adv_estimator="reinforce_plus_plus", **plain), 0)
    assert experience.advantages_T.tolist() == [0.0, 2.0, 4.0, 0.0, 6.0]
    remax = AlgorithmConfig(adv_estimator="remax", **plain)
    experience = estimate(outputs, remax, 0, baseline_scores_B=torch.tensor([1.0, 7.0]))
    assert experience.advantages_T.tolist() == [0.0, 3.0, 3.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="greedy"):
        estimate(outputs, remax, 0)


def test_group_estimators_spread_one_number_over_the_response():
    outputs = outputs_of([2, 1], scores=[1.0, 3.0])
    experience = estimate(outputs, AlgorithmConfig(adv_estimator="dr_grpo"), 0)
    assert experience.advantages_T.tolist() == [0.0, -1.0, -1.0, 0.0, 1.0]


def test_an_empty_response_still_counts_in_its_group():
    outputs = outputs_of([0, 1], scores=[1.0, 3.0])
    experience = estimate(outputs, AlgorithmConfig(adv_estimator="rloo"), 0)
    assert experience.advantages_T.tolist() == [0.0, 0.0, 2.0]


def test_only_gae_needs_a_critic():
    wanting = [n for n in ESTIMATORS if AlgorithmConfig(adv_estimator=n).uses_critic]
    assert wanting == ["gae"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_critic_free_estimators_do_not_read_values(estimator):
    algorithm = AlgorithmConfig(adv_estimator=estimator)
    outputs = outputs_of([3, 2, 4, 1])
    other = dataclasses.replace(outputs, values_T=outputs.values_T + 1)
    baseline = torch.zeros(4)
    first, second = (
        estimate(m, algorithm, 0.0, baseline_scores_B=baseline) for m in (outputs, other)
    )
    assert torch.equal(first.advantages_T, second.advantages_T) != algorithm.uses_critic


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [1], [0], [0, 0], []])
def test_every_estimator_is_finite_at_the_edges(estimator, lengths):
    outputs = outputs_of(lengths)
    for rejection, whiten in zip(REJECTIONS, (True, False) * 7):
        algorithm = AlgorithmConfig(
            adv_estimator=estimator,
            use_kl_in_reward=True,
            kl_penalty="k3",
            whiten_rewards=whiten,
            whiten_advantages=whiten,
            rollout_correction=RolloutCorrectionConfig(
                rollout_is="sequence" if whiten else "token",
                rollout_is_mode="mask" if whiten else "truncate",
                rollout_is_batch_normalize=True,
                rollout_rs=rejection,
                rollout_token_veto_threshold=1e-4,
            ),
        )
        experience = estimate(outputs, algorithm, 0.1, baseline_scores_B=torch.zeros(len(lengths)))
        assert finite(experience)
        metrics = experience_metrics(experience)
        assert all(math.isfinite(value) for value in metrics.values())


def test_huge_log_ratios_leave_everything_finite():
    outputs = outputs_of([3, 2])
    outputs = dataclasses.replace(
        outputs, logprobs_T=outputs.batch.response_mask_T * -1e4, ref_logprobs_T=torch.zeros(7)
    )
    for kind in ("k1", "abs", "k2", "k3"):
        correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_sum_k3")
        algorithm = AlgorithmConfig(
            use_kl_in_reward=True, kl_penalty=kind, rollout_correction=correction
        )
        experience = estimate(outputs, algorithm, 0.1)
        assert finite(experience)
        assert all(math.isfinite(v) for v in experience_metrics(experience).values())


def test_bypass_trains_against_the_engine_and_refuses_double_correction():
    outputs = outputs_of([3])
    correction = RolloutCorrectionConfig(bypass_mode=True)
    experience = estimate(outputs, AlgorithmConfig(rollout_correction=correction), 0)
    assert torch.equal(experience.old.logprobs_T, outputs.batch.rollout_logprobs_T)
    both = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    with pytest.raises(ValueError, match="rollout_is: off"):
        estimate(outputs, AlgorithmConfig(rollout_correction=both), 0)


def test_truncated_responses_can_be_left_out_of_the_loss():
    experience = estimate(outputs_of([2, 2]), AlgorithmConfig(mask_truncated=True), 0)
    assert experience.loss_weight_T.tolist() == [0, 1, 1, 0, 0, 0]


def test_scores_are_normalised_as_asked():
    batch = outputs_of([1, 1, 1, 1], scores=[1.0, 3.0, 5.0, 5.0]).batch
    moments = RewardStats()
    moments.merge(batch.scores_B)

    def scores(mode, **kwargs):
        config = ScoreNormalizationConfig(mode=mode, **kwargs)
        algorithm = AlgorithmConfig(normalize_scores=config)
        return normalize_scores(batch, torch.empty(0), algorithm, moments)[0].scores_B

    assert scores("off") is batch.scores_B
    assert scores("given", mean=1.0, std=2.0).tolist() == [0.0, 1.0, 2.0, 2.0]
    torch.testing.assert_close(scores("batch").mean(), torch.tensor(0.0))
    torch.testing.assert_close(scores("group")[2:], torch.zeros(2))
    torch.testing.assert_close(scores("running"), scores("batch"))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # (score - 4) / 2 of [1, 3, 6, 6] against that of [7, 7, 2, 2]
        ({"mode": "given", "mean": 4.0, "std": 2.0}, [-3.0, -2.0, 2.0, 2.0]),
        # the batch's mean is 4, its variance (9 + 1 + 4 + 4) / 3 = 6
        ({"mode": "batch"}, [-6 / 6**0.5, -4 / 6**0.5, 4 / 6**0.5, 4 / 6**0.5]),
        ({"mode": "running"}, [-6 / 6**0.5, -4 / 6**0.5, 4 / 6**0.5, 4 / 6**0.5]),
        # the groups' deviations are sqrt(2) and none
        ({"mode": "group"}, [-6 / 2**0.5, -4 / 2**0.5, 4.0, 4.0]),
    ],
)
def test_remax_compares_scores_and_greedy_scores_on_one_scale(mode, expected):
    outputs = outputs_of([1, 1, 1, 1], scores=[1.0, 3.0, 6.0, 6.0])
    moments = RewardStats()
    moments.merge(outputs.batch.scores_B)
    algorithm = AlgorithmConfig(adv_estimator="remax", normalize_scores=mode)
    greedy_B = torch.tensor([7.0, 7.0, 2.0, 2.0])
    batch, baseline_B = normalize_scores(outputs.batch, greedy_B, algorithm, moments)
    experience = estimate(
        dataclasses.replace(outputs, batch=batch), algorithm, 0.0, baseline_scores_B=baseline_B
    )
    inside = outputs.batch.response_mask_T > 0
    torch.testing.assert_close(experience.advantages_T[inside], torch.tensor(expected))


def test_pf_ppo_draws_whole_sequences_of_the_experience():
    experience = estimate(
        outputs_of([3, 0, 5, 2], scores=[0.0, 0.0, 0.0, 9.0]), AlgorithmConfig(), 0
    )
    assert resample_experience(experience, AlgorithmConfig(), 0) is experience
    algorithm = AlgorithmConfig(use_pf_ppo=True, pf_ppo=PFPPOConfig(reweight_method="pow"))
    drawn = resample_experience(experience, algorithm, seed=1)
    assert drawn.old.batch.scores_B.tolist() == [9.0] * 4
    expected = experience.advantages_T[-3:].repeat(4)
    torch.testing.assert_close(drawn.advantages_T, expected)


def test_selecting_and_concatenating_batches():
    experience = estimate(outputs_of([3, 0, 5]), AlgorithmConfig(), 0)
    again = select_experience(experience, [0, 1, 2])
    torch.testing.assert_close(again.old.values_T, experience.old.values_T)
    batch = experience.old.batch
    joined = concatenate_batches([select_batch(batch, [2]), select_batch(batch, [0, 1])])
    assert joined.tokens_T.tolist() == select_batch(batch, [2, 0, 1]).tokens_T.tolist()
    assert joined.cu_seqlens.tolist() == [0, 6, 10, 11]
    with pytest.raises(ValueError, match="at least one batch"):
        concatenate_batches([])


def test_dynamic_sampling_keeps_groups_that_differ():
    scores, group = torch.tensor([1.0, 1, 0, 1, 2]), torch.tensor([5, 5, 3, 3, 9])
    assert informative_sequences(scores, group).tolist() == [2, 3, 4]
    assert informative_sequences(scores[:0], group[:0]).tolist() == []


def test_a_batch_takes_the_first_groups_that_differ_and_fills_up():
    scores = torch.tensor([1.0, 1, 0, 1, 2, 2, 3, 5])
    group = torch.tensor([8, 8, 3, 3, 9, 9, 1, 1])
    assert first_groups(scores, group, 1).tolist() == [2, 3]
    assert first_groups(scores, group, 2).tolist() == [2, 3, 6, 7]
    assert first_groups(scores, group, 3).tolist() == [0, 1, 2, 3, 6, 7]
    assert first_groups(scores, group, 4).tolist() == list(range(8))


def test_experience_metrics_by_hand():
    outputs = outputs_of([2, 1], scores=[3.0, 1.0])
    experience = estimate(outputs, AlgorithmConfig(use_kl_in_reward=True), 0.1)
    metrics = experience_metrics(experience)
    assert metrics["critic/score/mean"] == 2.0
    assert (metrics["response_length/max"], metrics["prompt_length/mean"]) == (2.0, 1.0)
    assert metrics["response_length/clip_ratio"] == 0.5
    kl = (outputs.logprobs_T - outputs.ref_logprobs_T).sum().item() / 2
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.1 * kl, rel=1e-4)
    total = metrics["objective/scores"] + metrics["objective/non_score_reward"]
    assert metrics["objective/rlhf_reward"] == pytest.approx(total)
    assert metrics["val/num_eos_tokens"] == 1.0
    perfect = dataclasses.replace(
        experience, old=dataclasses.replace(outputs, values_T=experience.returns_T)
    )
    assert experience_metrics(perfect)["critic/vf_explained_var"] == pytest.approx(1.0)


# Each system's published formula, on padded rows as that system has them, in float64.


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
    losses = PolicyLossConfig.model_fields["loss_mode"].annotation.__args__
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
                policy_loss=PolicyLossConfig(loss_mode=loss_mode),
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


def test_the_controller_a_recipe_asks_for():
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=100)
    controller = kl_controller(config)
    controller.update(0.2, 10)
    assert controller.coef == pytest.approx(0.2 * 1.02)
