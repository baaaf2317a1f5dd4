"""What the last pipeline stage evaluates for one micro-batch: targets in, a scalar loss out.

Targets are made once for a whole mini-batch (:func:`policy_targets`, :func:`value_targets`), with a
weight for every token that already holds the mini-batch's normaliser; the objectives then cuts
whole sequences out of them. So the losses, and the statistics, of any cut into micro-batches and
ranks add up to the mini-batch's: sum them, divide by nothing.

Shapes: ``T`` tokens of whole sequences end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mppo.algos.aggregation import aggregation_weights_T
from mppo.algos.covariance import covariance, covariance_band, covariance_top
from mppo.algos.kl import kl_estimate
from mppo.algos.packing import select_cu_seqlens, select_sequences
from mppo.algos.policy_loss import (
    Loss,
    cispo,
    clip_cov,
    clipped_surrogate,
    gmpo,
    gspo,
    importance_ratio,
    kl_cov,
    plain_surrogate,
    policy_gradient,
    sapo,
)
from mppo.algos.rollout_correction import sequence_geometric_mean
from mppo.algos.value_loss import value_loss
from mppo.batch import Experience
from mppo.config.sections.roles import SEQUENCE_LOSSES, ActorConfig, CriticConfig
from mppo.models.heads.outputs import PolicyOutputs, ValueOutputs


@dataclass(frozen=True)
class PolicyTargets:
    """What the policy's loss compares with, on one flat token axis of whole sequences.

    Args:
        cu_seqlens: int64 ``[B + 1]``.
        mask_T: float32 ``[T]``, 1 on the tokens trained on (response tokens not rejected).
        weight_T: float32 ``[T]``, each token's share in the mini-batch's loss (aggregation).
        importance_T: float32 ``[T]``, rollout-correction weight of the token's policy loss.
            GMPO's is the same on all of a sequence's tokens.
        metric_weight_T: float32 ``[T]``, 1 / (masked tokens of the mini-batch) on the mask.
        old_logprobs_T: log-probabilities before the update.
        ref_logprobs_T: the reference's.
        advantages_T: float32 ``[T]``.
        selected_T: float32 ``[T]``, 1 on the tokens Clip-Cov or KL-Cov chose; else 0.
    """

    cu_seqlens: Tensor
    mask_T: Tensor
    weight_T: Tensor
    importance_T: Tensor
    metric_weight_T: Tensor
    old_logprobs_T: Tensor
    ref_logprobs_T: Tensor
    advantages_T: Tensor
    selected_T: Tensor


@dataclass(frozen=True)
class ValueTargets:
    """What the critic's loss compares with; ``cu_seqlens`` to ``metric_weight_T`` as above.

    Args:
        old_values_T: values before the update, float32 ``[T]``.
        returns_T: regression target, float32 ``[T]``.
    """

    cu_seqlens: Tensor
    mask_T: Tensor
    weight_T: Tensor
    metric_weight_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor


Targets = TypeVar("Targets", PolicyTargets, ValueTargets)


def select_targets(targets: Targets, indices: Sequence[int] | Tensor) -> Targets:
    """Cut whole sequences out: ``indices`` count within ``targets``, in any order."""
    changes = {
        field.name: select_sequences(getattr(targets, field.name), targets.cu_seqlens, indices)
        for field in fields(targets)
        if field.name != "cu_seqlens"
    }
    return replace(targets, cu_seqlens=select_cu_seqlens(targets.cu_seqlens, indices), **changes)


class _OfMiniBatch:
    """What the two objectives share: finding a micro-batch's sequences in the mini-batch."""

    sequences: tuple[int, ...]

    @cached_property
    def _position(self) -> dict[int, int]:
        return {index: position for position, index in enumerate(self.sequences)}

    def _positions(self, indices: Sequence[int]) -> list[int]:
        """Where in the mini-batch some sequences of the batch stand."""
        return [self._position[index] for index in indices]


def to_device(targets: Targets, device: torch.device | str) -> Targets:
    """The same targets on ``device``."""
    return replace(
        targets,
        **{field.name: getattr(targets, field.name).to(device) for field in fields(targets)},
    )


def policy_targets(
    experience: Experience,
    indices: Sequence[int] | Tensor,
    actor: ActorConfig,
    max_response_length: int,
    seed: int = 0,
) -> PolicyTargets:
    """Targets of one mini-batch.

    A token whose ``loss_weight_T`` is 0 (rejected) leaves the mask, and so the normalisers.

    Args:
        experience: the whole batch.
        indices: the mini-batch's sequences, counted within the batch.
        actor: loss mode and aggregation.
        max_response_length: in tokens, of the recipe; the scale of ``seq-mean-token-sum-norm``
            where ``loss_scale_factor`` gives none.
        seed: of Clip-Cov's random choice.

    Returns:
        PolicyTargets on the experience's device, float32.
    """
    old = experience.old
    full_cu_seqlens = old.batch.cu_seqlens

    def cut(x_T: Tensor) -> Tensor:
        return select_sequences(x_T, full_cu_seqlens, indices).float()

    cu_seqlens = select_cu_seqlens(full_cu_seqlens, indices)
    importance_T = cut(experience.loss_weight_T)
    mask_T = cut(old.batch.response_mask_T) * (importance_T != 0)
    logprobs_T, advantages_T = cut(old.logprobs_T), cut(experience.advantages_T)
    loss = actor.policy_loss
    selected_T = torch.zeros_like(mask_T)
    if loss.loss_mode in ("clip_cov", "kl_cov"):
        cov_T = covariance(logprobs_T, advantages_T, mask_T)
        if loss.loss_mode == "clip_cov":
            selected_T = covariance_band(
                cov_T, mask_T, loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub, seed
            )
        else:
            selected_T = covariance_top(cov_T, mask_T, loss.kl_cov_ratio)
    if loss.loss_mode == "gmpo":
        importance_T = sequence_geometric_mean(importance_T, mask_T, cu_seqlens)
    mode = "seq-mean-token-mean" if loss.loss_mode in SEQUENCE_LOSSES else actor.loss_agg_mode
    scale = actor.loss_scale_factor or max_response_length
    return PolicyTargets(
        cu_seqlens=cu_seqlens,
        mask_T=mask_T,
        weight_T=aggregation_weights_T(mask_T, cu_seqlens, mode, scale),
        importance_T=importance_T,
        metric_weight_T=aggregation_weights_T(mask_T, cu_seqlens, "token-mean"),
        old_logprobs_T=logprobs_T,
        ref_logprobs_T=cut(old.ref_logprobs_T),
        advantages_T=advantages_T,
        selected_T=selected_T,
    )


def value_targets(
    experience: Experience,
    indices: Sequence[int] | Tensor,
    critic: CriticConfig,
    max_response_length: int,
) -> ValueTargets:
    """Targets of one mini-batch for the critic; arguments as in :func:`policy_targets`."""
    old = experience.old
    full_cu_seqlens = old.batch.cu_seqlens

    def cut(x_T: Tensor) -> Tensor:
        return select_sequences(x_T, full_cu_seqlens, indices).float()

    cu_seqlens = select_cu_seqlens(full_cu_seqlens, indices)
    mask_T = cut(old.batch.value_mask_T) * (cut(experience.loss_weight_T) != 0)
    mode = critic.loss_agg_mode
    return ValueTargets(
        cu_seqlens=cu_seqlens,
        mask_T=mask_T,
        weight_T=aggregation_weights_T(mask_T, cu_seqlens, mode, max_response_length),
        metric_weight_T=aggregation_weights_T(mask_T, cu_seqlens, "token-mean"),
        old_values_T=cut(old.values_T),
        returns_T=cut(experience.returns_T),
    )


@dataclass(frozen=True)
class PolicyObjective(_OfMiniBatch):
    """The actor's loss on a micro-batch of a mini-batch.

    ``sum_t w_t (importance_t pg_t - entropy_coeff H_t + kl_loss_coef kl_t)``

    Args:
        targets: of the mini-batch, on the model's device.
        sequences: the mini-batch's sequences, as indices of the batch, in the targets' order.
        actor: loss mode and coefficients.
    """

    targets: PolicyTargets
    sequences: tuple[int, ...]
    actor: ActorConfig

    def __call__(
        self, outputs: PolicyOutputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of some of the sequences.

        Args:
            outputs: the policy's outputs now, float ``[T]``; anything outside the mask.
            indices: which sequences, as indices of the batch.

        Returns:
            Scalar loss, joined to the graph even where no token is masked in; and detached scalar
            sums under their metric names. Over a mini-batch's micro-batches and data-parallel ranks
            both add up to the mini-batch's loss and metrics.
        """
        actor = self.actor
        targets = select_targets(self.targets, self._positions(indices))
        inside_T = targets.mask_T > 0
        logprobs_T = torch.where(inside_T, outputs.logprobs_T.float(), 0.0)
        entropy_T = torch.where(inside_T, outputs.entropy_T.float(), 0.0)
        ratio_T, log_ratio_T = importance_ratio(logprobs_T, targets.old_logprobs_T)
        pg_T, clipped_T, dual_clipped_T = policy_loss(
            logprobs_T, ratio_T, log_ratio_T, targets, actor
        )
        pg_loss = (targets.weight_T * targets.importance_T * pg_T).sum()
        entropy = (targets.weight_T * entropy_T).sum()
        loss = pg_loss
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * entropy

        def mean(x_T: Tensor) -> Tensor:
            return (targets.metric_weight_T * x_T).sum().detach()

        stats = {
            "actor/pg_loss": pg_loss.detach(),
            "actor/entropy": entropy.detach(),
            "actor/pg_clipfrac": mean(clipped_T),
            "actor/pg_clipfrac_lower": mean(dual_clipped_T),
            "actor/ppo_kl": mean(-log_ratio_T),
            "policy/approxkl_avg": mean(0.5 * log_ratio_T.square()),
            "policy/clipfrac_avg": mean(clipped_T),
            "policy/entropy_avg": mean(entropy_T),
            "loss/policy_avg": pg_loss.detach(),
            "val/ratio": mean(ratio_T),
        }
        if actor.use_kl_loss:
            full_kl_T = outputs.full_kl_T
            if full_kl_T is not None:
                full_kl_T = torch.where(inside_T, full_kl_T.float(), 0.0)
            kl_T = kl_estimate(logprobs_T, targets.ref_logprobs_T, actor.kl_loss_type, full_kl_T)
            kl_loss = (targets.weight_T * kl_T).sum()
            loss = loss + actor.kl_loss_coef * kl_loss
            stats["actor/kl_loss"] = kl_loss.detach()
        return loss, stats


def policy_loss(
    logprobs_T: Tensor,
    ratio_T: Tensor,
    log_ratio_T: Tensor,
    targets: PolicyTargets,
    actor: ActorConfig,
) -> Loss:
    """The token losses of ``actor.policy_loss.loss_mode``."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    advantages_T, loss = targets.advantages_T, actor.policy_loss
    match loss.loss_mode:
        case "vanilla":
            return clipped_surrogate(ratio_T, advantages_T, low, high, actor.clip_ratio_c)
        case "gspo" | "gmpo":
            formula = gspo if loss.loss_mode == "gspo" else gmpo
            old_T, mask_T, cu_seqlens = targets.old_logprobs_T, targets.mask_T, targets.cu_seqlens
            return formula(logprobs_T, old_T, advantages_T, mask_T, cu_seqlens, low, high)
        case "cispo":
            return cispo(logprobs_T, ratio_T, advantages_T, low, high)
        case "sapo":
            return sapo(ratio_T, advantages_T, loss.tau_pos, loss.tau_neg)
        case "clip_cov":
            return clip_cov(ratio_T, advantages_T, targets.selected_T, low, high)
        case "kl_cov":
            coef = loss.ppo_kl_coef
            return kl_cov(ratio_T, log_ratio_T, advantages_T, targets.selected_T, coef)
        case "gpg":
            return policy_gradient(logprobs_T, advantages_T)
        case "plain":
            return plain_surrogate(ratio_T, advantages_T)


@dataclass(frozen=True)
class ValueObjective(_OfMiniBatch):
    """The critic's loss on a micro-batch of a mini-batch: ``value_loss_coef sum_t w_t vf_t``.

    Args:
        targets: of the mini-batch, on the model's device.
        sequences: the mini-batch's sequences, as indices of the batch, in the targets' order.
        critic: clip range and coefficient.
    """

    targets: ValueTargets
    sequences: tuple[int, ...]
    critic: CriticConfig

    def __call__(
        self, outputs: ValueOutputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As :class:`PolicyObjective`; the metrics are of the loss without its coefficient."""
        critic = self.critic
        targets = select_targets(self.targets, self._positions(indices))
        values_T = torch.where(targets.mask_T > 0, outputs.values_T.float(), 0.0)
        vf_T, clipped_T = value_loss(
            values_T, targets.old_values_T, targets.returns_T, critic.cliprange_value
        )
        vf_loss = (targets.weight_T * vf_T).sum()

        def mean(x_T: Tensor) -> Tensor:
            return (targets.metric_weight_T * x_T).sum().detach()

        stats = {
            "critic/vf_loss": vf_loss.detach(),
            "critic/vf_clipfrac": mean(clipped_T),
            "critic/vpred_mean": mean(values_T),
            "loss/value_avg": vf_loss.detach(),
            "val/clipfrac_avg": mean(clipped_T),
        }
        return critic.value_loss_coef * vf_loss, stats
