"""Weights and rejections for the gap between the engine's probabilities and the actor's.

``d_t = log pi_actor(old) - log pi_engine`` of each response token. All results are
detached: the weights correct the sampling distribution, not the objective.

Shapes: ``B`` sequences, ``T`` tokens.

Source: verl ``rollout_corr_helper``; IcePop https://ringtech.notion.site/icepop;
truncated importance sampling https://fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mppo.algos.masked import (
    ALONE,
    Gather,
    Moments,
    expand_to_tokens,
    merged_moments,
    sequence_mean,
    sequence_moments,
    sequence_sum,
)
from mppo.safety.input_error import InputError

LOG_RATIO_LIMIT = 20.0

STATISTICS = ("d", "abs_d", "k3", "square", "train", "rollout", "probs_diff")
"""Names of ``correction_statistics``."""


def importance_weights(
    log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: str
) -> Tensor:
    """``exp(d_t)`` (``token``), or ``exp(sum_t d_t)`` of the ``sequence``; the exponent is clamped
    to +-20. 0 outside the mask."""
    if level == "token":
        exponent_T = log_ratio_T
    elif level == "sequence":
        exponent_T = expand_to_tokens(sequence_sum(log_ratio_T * mask_T, cu_seqlens), cu_seqlens)
    else:
        raise InputError(f"rollout_is: unknown level {level!r}; use token or sequence")
    weight_T = exponent_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.where(mask_T > 0, weight_T, 0.0)


def truncate_weights(weight_T: Tensor, upper: float, lower: float | None = None) -> Tensor:
    """Truncated importance sampling: ``min(w, upper)``, and ``max(., lower)`` if given. A weight of
    0 (outside the mask) stays 0."""
    truncated_T = weight_T.clamp(min=lower, max=upper)
    return torch.where(weight_T > 0, truncated_T, 0.0)


def sequence_geometric_mean(weight_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``exp(mean_t log w_t)`` over a sequence's masked tokens, where w is positive, on each of
    them; 0 outside the mask. Source: verl ``compute_policy_loss_geo_mean``."""
    log_T = torch.where(mask_T > 0, weight_T, 1.0).log()
    return expand_to_tokens(sequence_mean(log_T, mask_T, cu_seqlens).exp(), cu_seqlens) * mask_T


def icepop(weight_T: Tensor, upper: float, lower: float) -> Tensor:
    """IcePop: ``w`` within ``[lower, upper]``, 0 outside it."""
    return torch.where((weight_T >= lower) & (weight_T <= upper), weight_T, 0.0)


def normalize_weights(
    weight_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: str, gather: Gather = ALONE
) -> Tensor:
    """Divide by the batch's mean weight, over tokens or sequences (``level``), unless all are 0."""
    moments_B = sequence_moments(weight_T, mask_T, cu_seqlens, with_range=False)
    moments_B = gather.sequences(moments_B)
    mean = merged_moments(moments_B).mean
    if level == "sequence":
        present_B = moments_B[:, 0] > 0
        mean = _mean(moments_B[present_B, 1])
    return weight_T / (mean if mean > 0 else 1.0)


def _mean(x: Tensor) -> float:
    return x.mean().item() if len(x) else 0.0


def rejection_mask(
    log_ratio_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    kind: str,
    upper: float,
    lower: float | None,
) -> Tensor:
    """1 on the tokens to keep: those whose divergence lies within the threshold.

    ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d`` (0 where engine and actor agree), of the
    token (``token_*``), or summed, averaged or maximised over the sequence (``seq_sum_*``,
    ``seq_mean_*``, ``seq_max_*``), which is then kept or rejected as a unit. ``geometric`` is
    ``seq_mean_k1``. k1 is kept within ``[log lower, log upper]``: the thresholds are ratios;
    ``seq_max_k1`` tests the largest and the smallest ``k1``. k2 and k3 are kept up to
    ``upper``. ``lower`` is k1's lower ratio; None takes ``1 / upper``. 0 outside the mask.
    """
    name = "seq_mean_k1" if kind == "geometric" else kind
    level, _, divergence = name.rpartition("_")
    d_T = torch.where(mask_T > 0, log_ratio_T, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    divergences = {"k1": -d_T, "k2": 0.5 * d_T.square(), "k3": torch.expm1(d_T) - d_T}
    if divergence not in divergences or level not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise InputError(
            f"rollout_rs: unknown kind {kind!r}; use geometric, or token, seq_sum, seq_mean or "
            "seq_max with _k1, _k2 or _k3"
        )
    stat_T = divergences[divergence]
    high, low = upper, -math.inf
    if divergence == "k1":
        high, low = math.log(upper), math.log(1.0 / upper if lower is None else lower)
    if level == "token":
        kept_T = (stat_T >= low) & (stat_T <= high)
    else:
        top_B, bottom_B = _over_sequences(stat_T, mask_T, cu_seqlens, level)
        kept_T = expand_to_tokens((bottom_B >= low) & (top_B <= high), cu_seqlens)
    return mask_T * kept_T


def _over_sequences(
    stat_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: str
) -> tuple[Tensor, Tensor]:
    """Largest and smallest value of the statistic per sequence (equal for sum and mean)."""
    if level == "seq_max":
        top_T = torch.where(mask_T > 0, stat_T, -torch.inf)
        bottom_T = torch.where(mask_T > 0, stat_T, torch.inf)
        return (
            torch.segment_reduce(top_T, "max", offsets=cu_seqlens),
            torch.segment_reduce(bottom_T, "min", offsets=cu_seqlens),
        )
    if level == "seq_sum":
        total_B = sequence_sum(stat_T * mask_T, cu_seqlens)
    else:
        total_B = sequence_mean(stat_T, mask_T, cu_seqlens)
    return total_B, total_B


def veto_mask(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, threshold: float) -> Tensor:
    """``mask_T`` without the sequences with a token of ``exp(d) < threshold``, such as 1e-4."""
    catastrophic_T = (log_ratio_T < math.log(threshold)) & (mask_T > 0)
    vetoed_B = sequence_sum(catastrophic_T.to(mask_T.dtype), cu_seqlens) > 0
    return mask_T * (~expand_to_tokens(vetoed_B, cu_seqlens))


def correction_statistics(
    logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor
) -> dict[str, Tensor]:
    """What :func:`correction_metrics` needs of each sequence: ``sequence_moments`` ``[B, 5]`` of
    quantities of the tokens, by name."""
    d_T = torch.where(mask_T > 0, logprobs_T - rollout_logprobs_T, 0.0).double()
    clamped_T = d_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    probs_T, rollout_probs_T = (
        x_T.double().clamp(max=0.0).exp() for x_T in (logprobs_T, rollout_logprobs_T)
    )
    tokens = {
        "d": d_T,
        "abs_d": d_T.abs(),
        "k3": torch.expm1(clamped_T) - clamped_T,
        "square": (2 * clamped_T).exp() - 1,
        "train": logprobs_T,
        "rollout": rollout_logprobs_T,
        "probs_diff": (probs_T - rollout_probs_T).abs(),
    }
    return {name: sequence_moments(tokens[name], mask_T, cu_seqlens) for name in STATISTICS}


def correction_metrics(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """Gap between the engine's and the actor's probabilities: verl's ``rollout_corr/*``.

    ``kl`` is ``mean(log engine - log actor)``, ``k3_kl`` its low-variance form; ``*_ppl`` the
    mean over sequences of ``exp(-mean log p)``; ``log_ppl_diff`` the mean over sequences of
    ``mean log engine - mean log actor``; ``chi2_token`` ``mean(w^2) - 1``, ``chi2_seq`` the same
    with the sequences' weights.
    """
    tokens = {name: merged_moments(moments_B) for name, moments_B in statistics.items()}
    count_B = statistics["d"][:, 0]
    present_B = count_B > 0

    def over_sequences(x_B: Tensor) -> float:
        return _mean(x_B[present_B])

    train_B, rollout_B = (statistics[name][:, 1] for name in ("train", "rollout"))
    log_ppl_diff_B = rollout_B - train_B
    limit = LOG_RATIO_LIMIT
    sum_B = (count_B * statistics["d"][:, 1]).clamp(-limit, limit)
    return {
        "rollout_corr/kl": -tokens["d"].mean,
        "rollout_corr/k3_kl": tokens["k3"].mean,
        "rollout_corr/training_ppl": over_sequences((-train_B).clamp(max=limit).exp()),
        "rollout_corr/rollout_ppl": over_sequences((-rollout_B).clamp(max=limit).exp()),
        "rollout_corr/log_ppl_diff": over_sequences(log_ppl_diff_B),
        "rollout_corr/log_ppl_abs_diff": over_sequences(log_ppl_diff_B.abs()),
        "rollout_corr/ppl_ratio": over_sequences(log_ppl_diff_B.clamp(-limit, limit).exp()),
        "rollout_corr/chi2_token": tokens["square"].mean,
        "rollout_corr/chi2_seq": over_sequences((2 * sum_B).exp() - 1),
        "training/rollout_probs_diff_max": max(tokens["probs_diff"].max, 0.0),
        "training/rollout_probs_diff_mean": tokens["probs_diff"].mean,
        "training/rollout_logprobs_abs_diff": tokens["abs_d"].mean,
    }


def weight_metrics(weights: Moments, masked_fraction: float) -> dict[str, float]:
    """``rollout_corr/rollout_is_*`` of the weights: mean, max, min, std, effective sample size.
    ``eff_sample_size = mean(w)^2 / mean(w^2)``, 1 where all weights are equal; and the fraction of
    tokens whose weight is 0. An empty mask counts as one token of weight 1."""
    if weights.count == 0:
        weights = Moments(1.0, 1.0, 0.0, 1.0, 1.0)
    mean, variance = weights.mean, weights.var(unbiased=False)
    mean_square = variance + mean**2
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_max": weights.max,
        "rollout_corr/rollout_is_min": weights.min,
        "rollout_corr/rollout_is_std": math.sqrt(variance),
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / mean_square if mean_square else mean,
        "rollout_corr/rollout_masked_fraction": masked_fraction,
    }
