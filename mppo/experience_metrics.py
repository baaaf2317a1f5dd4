"""What to report of an experience: verl's names, and TRL's ``objective/*``."""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.masked import masked_var, sequence_sum
from mppo.algos.rollout_correction import mismatch_metrics, weight_metrics
from mppo.batch import Experience


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values, lengths, mismatch and objective.

    ``critic/score/*`` and ``critic/rewards/*`` are over sequences (a sequence's reward is the sum
    of its tokens'), ``critic/advantages|returns|values/*`` over response tokens.
    ``critic/vf_explained_var`` is ``1 - var(returns - values) / var(returns)``.
    ``objective/kl`` and ``objective/entropy`` are sums over a response's tokens of
    ``log pi - log pi_ref`` and ``-log pi``, averaged over responses; ``objective/rlhf_reward`` is
    ``objective/scores + objective/non_score_reward``.

    Args:
        experience: the whole batch, the same on every rank.

    Returns:
        Metric name to number; all finite, also for a batch without a response token.
    """
    measured = experience.measured
    batch = measured.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    inside_T = mask_T > 0
    length_B = sequence_sum(mask_T, cu_seqlens)
    reward_B = sequence_sum(experience.rewards_T, cu_seqlens)
    metrics: dict[str, float] = {}
    per_sequence = {
        "critic/score": batch.scores_B,
        "critic/rewards": reward_B,
        "response_length": length_B,
        "prompt_length": batch.lengths_B - sequence_sum(batch.value_mask_T, cu_seqlens),
    }
    per_token = {
        "critic/advantages": experience.advantages_T[inside_T],
        "critic/returns": experience.returns_T[inside_T],
        "critic/values": measured.values_T[inside_T],
    }
    for name, values in (per_sequence | per_token).items():
        metrics |= _mean_max_min(name, values)
    metrics["critic/vf_explained_var"] = explained_variance(
        measured.values_T, experience.returns_T, mask_T
    )
    present_B = length_B > 0
    metrics["response_length/clip_ratio"] = _mean(batch.truncated_B)
    metrics |= _mean_max_min("response_length_non_aborted", length_B[present_B])
    metrics["response_length_non_aborted/clip_ratio"] = _mean(batch.truncated_B[present_B])
    metrics["response/aborted_ratio"] = _mean(~present_B)
    if measured.logprobs_T is not batch.rollout_logprobs_T:
        metrics |= mismatch_metrics(
            measured.logprobs_T, batch.rollout_logprobs_T, mask_T, cu_seqlens
        )
    metrics |= weight_metrics(experience.loss_weight_T, mask_T)
    kl_T = torch.where(inside_T, measured.logprobs_T - measured.ref_logprobs_T, 0.0)
    surprisal_T = torch.where(inside_T, -measured.logprobs_T, 0.0)
    non_score_B = torch.where(length_B > 0, reward_B - batch.scores_B, 0.0)
    metrics["objective/kl"] = _mean(sequence_sum(kl_T, cu_seqlens))
    metrics["objective/entropy"] = _mean(sequence_sum(surprisal_T, cu_seqlens))
    metrics["objective/non_score_reward"] = _mean(non_score_B)
    metrics["objective/scores"] = _mean(batch.scores_B)
    metrics["objective/rlhf_reward"] = _mean(batch.scores_B + non_score_B)
    metrics["val/num_eos_tokens"] = float((~batch.truncated_B & present_B).sum())
    return metrics


def explained_variance(values_T: Tensor, returns_T: Tensor, mask_T: Tensor) -> float:
    """``1 - var(returns - values) / (var(returns) + 1e-5)`` over the masked tokens (verl)."""
    error_var = masked_var((returns_T - values_T).double(), mask_T.double())
    return_var = masked_var(returns_T.double(), mask_T.double())
    return (1.0 - error_var / (return_var + 1e-5)).item()


def _mean(x: Tensor) -> float:
    return x.double().mean().item() if len(x) else 0.0


def _mean_max_min(name: str, x: Tensor) -> dict[str, float]:
    """``name/mean``, ``name/max``, ``name/min``; zeros where there is nothing."""
    if len(x) == 0:
        x = torch.zeros(1)
    return {
        f"{name}/mean": _mean(x),
        f"{name}/max": x.max().item(),
        f"{name}/min": x.min().item(),
    }
