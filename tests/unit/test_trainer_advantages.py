"""From model outputs to experience: by hand, and in edge cases."""

import dataclasses
import math

import pytest
import torch
from random_outputs import ESTIMATORS, REJECTIONS, outputs_of

from mppo.algos.reward_normalization import RewardStats
from mppo.recipe.sections.algorithm import (
    AlgorithmConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
    ScoreNormalizationConfig,
)
from mppo.trainer.advantages import current_kl, estimate, kl_controller, normalize_scores
from mppo.trainer.metrics import experience_metrics


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


def test_returns_may_have_a_lambda_of_their_own():
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


def test_group_estimators_assign_one_number_to_all_tokens():
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


def test_bypass_trains_against_the_engine_and_leaves_weights_to_the_loss():
    outputs = outputs_of([3])
    correction = RolloutCorrectionConfig(bypass_mode=True)
    experience = estimate(outputs, AlgorithmConfig(rollout_correction=correction), 0)
    assert torch.equal(experience.old.logprobs_T, outputs.batch.rollout_logprobs_T)
    both = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    weighed = estimate(outputs, AlgorithmConfig(rollout_correction=both), 0)
    assert torch.equal(weighed.loss_weight_T, outputs.batch.response_mask_T)


def paper_masks(ratios, method):
    """The weight of each token of one sequence, from its ratios actor / engine."""
    geometric = math.prod(ratios) ** (1 / len(ratios))
    if method == "icepop":
        return [r if 0.5 <= r <= 5.0 else 0.0 for r in ratios]
    if method == "mis_po":
        kept = 0.996 <= geometric <= 1.001
        return [float(kept and 0.5 <= r <= 2.0) for r in ratios]
    return [r if 0.999 <= geometric <= 1.002 else 0.0 for r in ratios]  # seq-mask-tis


METHODS = {
    "icepop": {"rollout_is_mode": "mask", "rollout_is_lower": 0.5, "rollout_is_threshold": 5.0},
    "mis_po": {
        "rollout_is_mode": "indicator", "rollout_is_lower": 0.5, "rollout_is_threshold": 2.0,
        "rollout_rs": "geometric", "rollout_rs_threshold_lower": 1 / 1.001,
        "rollout_rs_threshold": 1 / 0.996,
    },
    "seq_mask_tis": {
        "rollout_is_threshold": 1e9, "rollout_rs": "geometric",
        "rollout_rs_threshold_lower": 1 / 1.002, "rollout_rs_threshold": 1 / 0.999,
    },
}  # fmt: skip
"""The table of docs/algorithms.md."""


@pytest.mark.parametrize("method", METHODS)
def test_published_corrections_equal_their_definitions(method):
    ratios = [
        [1.001, 0.9975],  # 0.99925: inside MIS-PO's and seq-mask-tis's bounds
        [1.0, 1.0, 0.994],  # 0.99800: MIS-PO's only
        [1.0016, 1.0014],  # 1.0015: seq-mask-tis's only
        [2.5, 0.4],  # 1: tokens beyond [0.5, 2]
        [0.9, 5.1, 3.0, 0.3],
        [6.0 / 4, 4.0 / 6],
    ]
    outputs = outputs_of([len(each) for each in ratios])
    log_ratio = torch.zeros_like(outputs.batch.response_mask_T)
    flat = [r for each in ratios for r in each]
    inside = outputs.batch.response_mask_T > 0
    log_ratio[inside] = torch.tensor(flat).log()
    engine = outputs.batch.rollout_logprobs_T
    outputs = dataclasses.replace(outputs, logprobs_T=engine + log_ratio)
    correction = RolloutCorrectionConfig(rollout_is="token", **METHODS[method])
    weight = estimate(outputs, AlgorithmConfig(rollout_correction=correction), 0).loss_weight_T
    want = [w for each in ratios for w in paper_masks(each, method)]
    assert weight[inside].tolist() == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert {0.0} < {round(w, 3) for w in want}, "some tokens are kept and some are not"


def test_mask_truncated_removes_truncated_responses_from_the_loss():
    experience = estimate(outputs_of([2, 2]), AlgorithmConfig(mask_truncated=True), 0)
    assert experience.loss_weight_T.tolist() == [0, 1, 1, 0, 0, 0]


def test_score_normalisation_modes_by_hand():
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
def test_remax_normalises_scores_and_greedy_scores_alike(mode, expected):
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


def test_the_recipe_selects_the_kl_controller():
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=100)
    controller = kl_controller(config)
    controller.update(0.2, 10)
    assert controller.coef == pytest.approx(0.2 * 1.02)
