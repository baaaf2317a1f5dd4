"""Rewards, advantages, returns and loss weights of a batch, from the models' outputs.

Pure functions of CPU tensors: every rank computes the same Experience from the same batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mppo import register
from mppo.algos.gae import (
    gae,
    length_adaptive_lambda,
    reward_to_go,
    segment_credit,
    tokens_after,
    turn_gae,
    turn_starts,
)
from mppo.algos.group_baselines import OutcomeOptions, gdpo
from mppo.algos.kl import KLController, kl_estimate
from mppo.algos.masked import (
    Moments,
    expand_to_tokens,
    masked_whiten,
    masked_whiten_by_group,
    merged_moments,
    place_at_last,
    sequence_mean,
    sequence_moments,
    sequence_sum,
)
from mppo.algos.reward_normalization import RewardStats, ScoreScale, batch_scale, group_scale
from mppo.algos.rollout_correction import (
    icepop,
    importance_weights,
    normalize_weights,
    rejection_mask,
    truncate_weights,
    veto_mask,
)
from mppo.algos.token_baseline import path_variance, token_baseline
from mppo.batch.batch import Batch, Sequences
from mppo.batch.gathers import gather_of
from mppo.batch.outputs import Experience, Outputs
from mppo.recipe.sections.algorithm import (
    AlgorithmConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
    ScoreNormalizationConfig,
)
from mppo.safety.input_error import InputError


def needs_greedy_baseline(algorithm: AlgorithmConfig) -> bool:
    return algorithm.adv_estimator == "remax"


def kl_controller(config: KLControlConfig) -> KLController:
    return KLController(config.type, config.kl_coef, config.target_kl, config.horizon)


def reward_kl(outputs: Outputs, algorithm: AlgorithmConfig) -> Tensor:
    """Per-token KL of actor and reference by ``algorithm.kl_penalty``: float ``[T]`` (nats)."""
    kl_T = kl_estimate(
        outputs.logprobs_T, outputs.ref_logprobs_T, algorithm.kl_penalty, outputs.full_kl_T
    )
    return torch.where(outputs.batch.response_mask_T > 0, kl_T, 0.0)


def current_kl(outputs: Outputs, algorithm: AlgorithmConfig) -> float:
    """KL for the KL controller: mean over sequences of the mean over tokens (nats). Collective."""
    batch = outputs.batch
    kl_T = reward_kl(outputs, algorithm)
    kl_H = sequence_mean(kl_T, batch.response_mask_T, batch.cu_seqlens)
    kl_B = gather_of(batch).sequences(kl_H)
    return kl_B.mean().item() if len(kl_B) else 0.0


def normalize_scores(
    batch: Batch, baseline_B: Tensor, algorithm: AlgorithmConfig, reward_stats: RewardStats
) -> tuple[Batch, Tensor]:
    """Normalise scores and baseline scores by ``algorithm.normalize_scores``. Token rewards, which
    are parts of the scores, are divided by the deviation; the mean is subtracted from the outcome
    reward. ``baseline_B`` has the scores of greedy responses, float32 ``[B]``, or is empty.
    ``reward_stats`` are of the run's scores up to and including this batch."""
    if algorithm.normalize_scores.mode == "off":
        return batch, baseline_B
    scale = _score_scale(batch, algorithm.normalize_scores, reward_stats)
    baseline_B = scale(baseline_B) if len(baseline_B) else baseline_B
    divisor = scale.divisor
    if isinstance(divisor, Tensor):
        divisor = expand_to_tokens(batch.here(divisor), batch.cu_seqlens)
    token_rewards_T = (batch.token_rewards_T / divisor).float()
    scaled = replace(batch, scores_B=scale(batch.scores_B), token_rewards_T=token_rewards_T)
    return scaled, baseline_B


def _score_scale(
    batch: Batch, config: ScoreNormalizationConfig, reward_stats: RewardStats
) -> ScoreScale:
    episodes = batch.episodes
    scores_E = batch.scores_B[episodes.last_E]
    if config.mode == "given":
        return ScoreScale(config.mean, config.std)
    if config.mode == "batch":
        return batch_scale(scores_E).at(episodes.of_B)
    if config.mode == "group":
        return group_scale(scores_E, batch.group_B[episodes.last_E]).at(episodes.of_B)
    return reward_stats.scale()


def estimate(
    outputs: Outputs,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    *,
    baseline_scores_B: Tensor | None = None,
) -> Experience:
    """Compute rewards, advantages, returns and loss weights of the sequences held. Collective.
    ``kl_coef`` is the controller's current coefficient of the KL in the reward;
    ``baseline_scores_B``, float32 ``[B]``, the score of a greedy response to the same prompt, on
    the scale of the batch's scores (InputError: ``remax`` without it). With ``bypass_mode`` the old
    log-probabilities of the experience are the engine's."""
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    penalty_T = torch.zeros_like(mask_T)
    if algorithm.use_kl_in_reward:
        penalty_T = -kl_coef * reward_kl(outputs, algorithm)
    outcome_H = batch.here(batch.scores_B) - _token_totals(batch)
    rewards_T = penalty_T + batch.token_rewards_T
    earlier_E = _rewards_of_earlier(batch, rewards_T)
    rewards_T = rewards_T + place_at_last(outcome_H, batch.value_mask_T, cu_seqlens)
    # end slots of responses that were cut off: their value stands for what would have followed
    bootstrap_T = batch.end_mask_T * expand_to_tokens(batch.here(batch.truncated_B), cu_seqlens)
    rewards_T = torch.where(bootstrap_T > 0, outputs.values_T, rewards_T)
    advantages_T, returns_T = _advantages(
        outputs, algorithm, rewards_T, earlier_E, baseline_scores_B
    )
    if algorithm.whitens:
        advantages_T = _whitened(advantages_T, batch, algorithm)
    correction = algorithm.rollout_correction
    weight_T = correction_weights(outputs, correction)
    if algorithm.mask_truncated:
        weight_T = weight_T * expand_to_tokens(~batch.here(batch.truncated_B), cu_seqlens)
    if algorithm.score_after_end:
        trained_B = sequence_sum((weight_T != 0).to(mask_T.dtype), cu_seqlens) > 0
        ends_T = batch.end_mask_T - bootstrap_T
        weight_T = weight_T + ends_T * expand_to_tokens(trained_B, cu_seqlens)
    if correction.bypass_mode:
        outputs = replace(outputs, logprobs_T=batch.rollout_logprobs_T, has_actor_logprobs=False)
    return Experience(outputs, rewards_T, advantages_T, returns_T, weight_T)


def _token_totals(batch: Batch) -> Tensor:
    """Sum of the token rewards of each held sequence's episode: float32 ``[H]``. Collective."""
    total_H = sequence_sum(batch.token_rewards_T, batch.cu_seqlens)
    episodes = batch.episodes
    if not episodes.has_branches:
        return total_H
    total_E = episodes.sum(gather_of(batch).sequences(total_H))
    return batch.here(total_E[episodes.of_B])


def _rewards_of_earlier(batch: Batch, token_rewards_T: Tensor) -> Tensor:
    """Sum of the tokens' rewards in the earlier sequences of each episode: ``[E]``. Collective. The
    reward of an episode is its score and the rewards of the tokens of all its sequences."""
    episodes = batch.episodes
    if not episodes.has_branches:
        return torch.zeros(len(episodes.last_E))
    total_B = gather_of(batch).sequences(sequence_sum(token_rewards_T, batch.cu_seqlens))
    total_B[episodes.last_E] = 0.0
    return episodes.sum(total_B)


def _whitened(advantages_T: Tensor, batch: Batch, algorithm: AlgorithmConfig) -> Tensor:
    mask_T, unbiased = batch.response_mask_T, algorithm.whiten_unbiased
    if algorithm.whiten_over == "group":
        cu_seqlens, group_B, gather = batch.cu_seqlens, batch.group_B, gather_of(batch)
        return masked_whiten_by_group(
            advantages_T, mask_T, cu_seqlens, group_B, unbiased, gather=gather, held_H=batch.held_H
        )
    moments = _moments(advantages_T, mask_T, batch)
    return masked_whiten(advantages_T, mask_T, unbiased=unbiased, moments=moments)


def _moments(x_T: Tensor, mask_T: Tensor, batch: Batch) -> Moments:
    """Moments of the masked tokens of all sequences, without maximum and minimum."""
    moments_H = sequence_moments(x_T, mask_T, batch.cu_seqlens, with_range=False)
    return merged_moments(gather_of(batch).sequences(moments_H))


def _advantages(
    outputs: Outputs,
    algorithm: AlgorithmConfig,
    rewards_T: Tensor,
    earlier_E: Tensor,
    baseline_scores_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    if algorithm.whiten_rewards:
        moments = _moments(rewards_T, batch.value_mask_T, batch)
        rewards_T = masked_whiten(rewards_T, batch.value_mask_T, shift_mean=False, moments=moments)
    if algorithm.uses_critic:
        return _gae_advantages(outputs, algorithm, rewards_T)
    if algorithm.adv_estimator == "reinforce_plus_plus":
        returns_T = reward_to_go(rewards_T, mask_T, cu_seqlens, algorithm.gamma)
        return returns_T, returns_T
    if needs_greedy_baseline(algorithm):
        if baseline_scores_B is None:
            raise InputError(
                "algorithm.adv_estimator=remax needs baseline_scores_B, the scores of greedy "
                "responses: generate one for each prompt"
            )
        returns_T = reward_to_go(rewards_T, mask_T, cu_seqlens, 1.0)
        baseline_H = batch.here(baseline_scores_B).to(returns_T.dtype)
        baseline_T = expand_to_tokens(baseline_H, cu_seqlens)
        return (returns_T - baseline_T) * mask_T, returns_T
    if algorithm.has_token_baseline:
        return _token_baseline(outputs, algorithm, rewards_T)
    return _outcome_advantages(batch, algorithm, rewards_T, earlier_E)


def _outcome_advantages(
    batch: Batch, algorithm: AlgorithmConfig, rewards_T: Tensor, earlier_E: Tensor
) -> tuple[Tensor, Tensor]:
    """One advantage per episode, from the rewards of its group; returns are the same."""
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    episodes, length_B = batch.episodes, batch.response_B.to(mask_T.dtype)
    if algorithm.adv_estimator == "gdpo":
        last_E = episodes.last_E
        weight_K = torch.tensor(algorithm.gdpo_reward_weights or [1.0] * batch.parts_B.shape[1])
        by_std = algorithm.norm_adv_by_std_in_grpo
        advantage_E = gdpo(batch.parts_B[last_E], batch.group_B[last_E], weight_K, by_std)
        advantage_H = batch.here(advantage_E[episodes.of_B])
        advantages_T = expand_to_tokens(advantage_H, cu_seqlens) * mask_T
        return advantages_T, advantages_T
    reward_B = gather_of(batch).sequences(sequence_sum(rewards_T, cu_seqlens))
    # the reward of an empty response is on no token
    outcome_B = torch.where(length_B > 0, reward_B, batch.scores_B)
    formula = register.estimator[algorithm.adv_estimator]
    options = OutcomeOptions(algorithm.norm_adv_by_std_in_grpo, algorithm.f_norm)
    last_E = episodes.last_E
    outcome_E = outcome_B[last_E] + earlier_E
    advantage_E = formula(outcome_E, batch.group_B[last_E], episodes.sum(length_B), options)
    shape = getattr(advantage_E, "shape", None)
    if shape != outcome_E.shape:
        found = shape or type(advantage_E).__name__
        what = f"the advantage estimator {algorithm.adv_estimator!r} returned {found}"
        raise InputError(f"{what}; return one number for each of {len(outcome_E)} responses")
    advantages_T = expand_to_tokens(batch.here(advantage_E[episodes.of_B]), cu_seqlens) * mask_T
    return advantages_T, advantages_T


def _token_baseline(
    outputs: Outputs, algorithm: AlgorithmConfig, rewards_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages by a baseline for each position; those of ``tir_optimal_token_baseline`` count the
    tokens that the policy generated. Collective."""
    batch, correction = outputs.batch, algorithm.rollout_correction
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    starts_H = cu_seqlens[:-1]
    if algorithm.adv_estimator == "optimal_token_baseline":
        first_T = expand_to_tokens(starts_H + batch.here(batch.prompt_B), cu_seqlens)
        place_T = torch.arange(len(mask_T)) - first_T
    else:
        ends_T = mask_T.long().cumsum(0)
        before_H = torch.cat([ends_T.new_zeros(1), ends_T])[starts_H]
        place_T = ends_T - 1 - expand_to_tokens(before_H, cu_seqlens)
    weighs = correction.rollout_is != "off"
    importance_T = _importance(outputs, correction) if weighs else None
    assert outputs.squares_T is not None, "filled in by Outputs"
    variance_T = path_variance(outputs.logprobs_T, outputs.squares_T, importance_T)
    gather = gather_of(batch)
    return token_baseline(
        rewards_T, variance_T, mask_T, place_T, cu_seqlens, batch.group_B, batch.held_H, gather
    )


def _gae_advantages(
    outputs: Outputs, algorithm: AlgorithmConfig, rewards_T: Tensor
) -> tuple[Tensor, Tensor]:
    """GAE; with ``lam_value`` the value's target uses a lambda of its own. ``segment_credit``
    reduces the policy's advantages only: a sequence's values predict its own reward."""
    batch = outputs.batch
    mask_T, cu_seqlens = batch.value_mask_T, batch.cu_seqlens
    values_T = torch.where(mask_T > 0, outputs.values_T, 0.0)
    lam: float | Tensor = algorithm.lam
    if algorithm.lam_length_adaptive_alpha is not None:
        length_H = batch.here(batch.response_B).to(mask_T.dtype)
        lam = length_adaptive_lambda(length_H, algorithm.lam_length_adaptive_alpha)
    by_turn = algorithm.gae_unit == "turn"
    states_T = value_states(batch, algorithm.gae_unit)

    def estimated(lam: float | Tensor) -> Tensor:
        gamma = algorithm.gamma
        if by_turn:
            return turn_gae(rewards_T, values_T, mask_T, states_T, cu_seqlens, gamma, lam)
        return gae(rewards_T, values_T, mask_T, cu_seqlens, gamma, lam)

    advantages_T = estimated(lam)
    lam_value = algorithm.lam_value
    value_advantages_T = advantages_T if lam_value is None else estimated(lam_value)
    if algorithm.segment_credit:
        after_B = tokens_after(batch.response_B, batch.episodes.of_B)
        credit_H = segment_credit(batch.here(after_B), algorithm.gamma, lam)
        advantages_T = advantages_T * expand_to_tokens(credit_H, cu_seqlens).to(mask_T.dtype)
    # of a turn the critic learns the first token's only
    returns_T = (value_advantages_T + values_T) * states_T
    return advantages_T * batch.response_mask_T, returns_T


def value_states(batch: Sequences, gae_unit: str) -> Tensor:
    """1 on the tokens before which the critic's value is a state's value, float32 ``[T]``: all
    response tokens (``gae_unit`` ``token``) or the first of each turn (``turn``), and end slots."""
    if gae_unit == "token":
        return batch.value_mask_T
    return turn_starts(batch.response_mask_T, batch.cu_seqlens) + batch.end_mask_T


def bounded_importance(
    log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, correction: RolloutCorrectionConfig
) -> Tensor:
    """Importance weights by ``rollout_is``, within its bounds, float32 ``[T]``, 0 off the mask,
    from log-probabilities of the policy minus the engine's."""
    upper, lower = correction.rollout_is_threshold, correction.rollout_is_lower
    weight_T = importance_weights(log_ratio_T, mask_T, cu_seqlens, correction.rollout_is)
    if correction.rollout_is_mode == "truncate":
        return truncate_weights(weight_T, upper, lower)
    weight_T = icepop(weight_T, upper, 1.0 / upper if lower is None else lower)
    return (
        (weight_T > 0).to(mask_T.dtype) if correction.rollout_is_mode == "indicator" else weight_T
    )


def correction_weights(outputs: Outputs, correction: RolloutCorrectionConfig) -> Tensor:
    """Compute ``loss_weight_T``, float32: response mask times importance weights, 0 on rejected
    tokens. With ``bypass_mode`` the policy loss itself weighs, by the current policy's ratio."""
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    log_ratio_T = outputs.logprobs_T - batch.rollout_logprobs_T
    weight_T = mask_T.clone()
    if correction.rollout_is != "off" and not correction.bypass_mode:
        weight_T = _importance(outputs, correction)
    for kind, upper, lower in correction.rejections():
        weight_T = weight_T * rejection_mask(log_ratio_T, mask_T, cu_seqlens, kind, upper, lower)
    if correction.rollout_token_veto_threshold is not None:
        threshold = correction.rollout_token_veto_threshold
        weight_T = weight_T * veto_mask(log_ratio_T, mask_T, cu_seqlens, threshold)
    return weight_T


def _importance(outputs: Outputs, correction: RolloutCorrectionConfig) -> Tensor:
    """Importance weights of the actor against the engine, float32 ``[T]``, 0 off the mask."""
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    log_ratio_T = outputs.logprobs_T - batch.rollout_logprobs_T
    weight_T = bounded_importance(log_ratio_T, mask_T, cu_seqlens, correction)
    if not correction.rollout_is_batch_normalize:
        return weight_T
    gather = gather_of(batch)
    return normalize_weights(weight_T, mask_T, cu_seqlens, correction.rollout_is, gather)
