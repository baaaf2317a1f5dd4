"""The objectives that the last pipeline stage evaluates for one micro-batch, and their targets.

Targets are built once per mini-batch (:func:`policy_targets`, :func:`value_targets`). The weight of
each token already contains the mini-batch's normaliser, and an objective selects the sequences of
its micro-batch from the targets. The losses and statistics of any division into micro-batches and
ranks therefore add up to the mini-batch's: sum them and divide by nothing.

Shapes: ``T`` tokens of complete sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mppo.algos.aggregation import aggregation_weights_T
from mppo.algos.covariance import MiniBatchTokens, covariance, covariance_band, covariance_top
from mppo.algos.kl import kl_estimate
from mppo.algos.masked import ALONE, Gather, sequence_sum
from mppo.algos.packing import select_cu_seqlens, select_sequences, sequence_token_indices
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
from mppo.models.heads.outputs import Outputs, PolicyOutputs, ValueOutputs
from mppo.parallel import device


@dataclass(frozen=True)
class PolicyTargets:
    """Targets of the policy's loss, on one flat token axis of complete sequences.

    Args:
        cu_seqlens: int64 ``[B + 1]``.
        mask_T: float32 ``[T]``, 1 on the tokens trained on (response tokens not rejected).
        weight_T: float32 ``[T]``, each token's share in the mini-batch's loss (aggregation).
        importance_T: float32 ``[T]``, rollout-correction weight of the token's policy loss.
            For GMPO it is equal on all tokens of a sequence.
        metric_weight_T: float32 ``[T]``, 1 / (masked tokens of the mini-batch) on the mask.
        old_logprobs_T: log-probabilities before the update.
        ref_logprobs_T: log-probabilities of the reference.
        advantages_T: float32 ``[T]``.
        selected_T: float32 ``[T]``, 1 on the tokens that Clip-Cov or KL-Cov selected, else 0.
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
    """Targets of the critic's loss; see ``PolicyTargets`` for the first four.

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
    """Select sequences by their position in ``targets``, in the order of ``indices``."""
    where_T = sequence_token_indices(targets.cu_seqlens, indices)  # once: it waits for the GPU
    changes = {
        field.name: getattr(targets, field.name)[where_T]
        for field in fields(targets)
        if field.name != "cu_seqlens"
    }
    return replace(targets, cu_seqlens=select_cu_seqlens(targets.cu_seqlens, indices), **changes)


@dataclass(frozen=True)
class _MiniBatchObjective(Generic[Targets]):
    """An objective over the micro-batches of one mini-batch.

    Args:
        targets: of the mini-batch's sequences whose loss this rank computes.
        sequences: these sequences, as indices of the batch, in the targets' order.
    """

    targets: Targets
    sequences: tuple[int, ...]

    @cached_property
    def _on_device(self) -> Targets:
        """The targets, moved to the device for the first micro-batch."""
        return to_device(self.targets, device.device())

    @cached_property
    def _position(self) -> dict[int, int]:
        return {index: position for position, index in enumerate(self.sequences)}

    def _select(self, indices: Sequence[int]) -> Targets:
        """Targets of a micro-batch, whose sequences are given as indices of the batch."""
        return select_targets(self._on_device, [self._position[index] for index in indices])


def _metric_mean(targets: PolicyTargets | ValueTargets, x_T: Tensor) -> Tensor:
    """A micro-batch's part of the mini-batch's token mean: a detached scalar."""
    return (targets.metric_weight_T * x_T).sum().detach()


def to_device(targets: Targets, device: torch.device | str) -> Targets:
    """Move targets to ``device``."""
    return replace(
        targets,
        **{field.name: getattr(targets, field.name).to(device) for field in fields(targets)},
    )


@dataclass(frozen=True)
class _MiniBatchTokens:
    """The tokens of a mini-batch that this rank holds.

    Args:
        cu_seqlens: int64 ``[H + 1]``.
        cut: maps ``[T]`` of the batch to float32 ``[T]`` of the mini-batch.
        position_H: int64 ``[H]``, position of each sequence in the mini-batch.
        gather: of the mini-batch.
    """

    cu_seqlens: Tensor
    cut: Callable[[Tensor], Tensor]
    position_H: Tensor
    gather: Gather

    def weights_T(self, mask_T: Tensor, count_B: Tensor, mode: str, scale: float = 1.0) -> Tensor:
        """Weight of each token in the mini-batch's loss."""
        return aggregation_weights_T(mask_T, self.cu_seqlens, mode, scale, count_B)

    def counts(self, mask_T: Tensor) -> Tensor:
        """Masked tokens of each sequence of the mini-batch: float32 ``[B]``. Collective."""
        return self.gather.sequences(sequence_sum(mask_T, self.cu_seqlens))


GatherOf = Callable[[Sequence[int] | Tensor], tuple[Gather, Tensor]]
"""See ``gathers.gather_of_mini_batch``, for one batch."""


def _everything(indices: Sequence[int] | Tensor) -> tuple[Gather, Tensor]:
    return ALONE, torch.arange(len(indices))


def _mini_batch_tokens(
    experience: Experience, indices: Sequence[int] | Tensor, gather_of: GatherOf
) -> _MiniBatchTokens:
    batch = experience.old.batch
    gather, position_H = gather_of(indices)
    places = batch.places(indices)[position_H]

    def cut(x_T: Tensor) -> Tensor:
        return select_sequences(x_T, batch.cu_seqlens, places).float()

    return _MiniBatchTokens(select_cu_seqlens(batch.cu_seqlens, places), cut, position_H, gather)


def policy_targets(
    experience: Experience,
    indices: Sequence[int] | Tensor,
    actor: ActorConfig,
    max_response_length: int,
    seed: int = 0,
    gather_of: GatherOf = _everything,
) -> PolicyTargets:
    """Build the policy's targets of one mini-batch, for the sequences held here.

    Collective if sequences are shared out. A token whose ``loss_weight_T`` is 0 (rejected) counts
    neither in the mask nor in the normalisers.

    Args:
        experience: the batch with advantages.
        indices: the mini-batch's sequences, as indices of the batch.
        actor: loss mode and aggregation.
        max_response_length: the recipe's, in tokens; the scale of ``seq-mean-token-sum-norm`` if
            ``loss_scale_factor`` is null.
        seed: seed of Clip-Cov's random selection.
        gather_of: makes the mini-batch's ``Gather``; by default all sequences are held.

    Returns:
        PolicyTargets on the experience's device, float32.
    """
    old, tokens = experience.old, _mini_batch_tokens(experience, indices, gather_of)
    cut, cu_seqlens = tokens.cut, tokens.cu_seqlens
    importance_T = cut(experience.loss_weight_T)
    mask_T = cut(old.batch.response_mask_T) * (importance_T != 0)
    logprobs_T, advantages_T = cut(old.logprobs_T), cut(experience.advantages_T)
    loss = actor.policy_loss
    # the selection ranks the tokens of the mini-batch, so it cannot be made per micro-batch
    selected_T = torch.zeros_like(mask_T)
    if loss.loss_mode in ("clip_cov", "kl_cov"):
        masked = MiniBatchTokens(mask_T, cu_seqlens, tokens.position_H, tokens.gather)
        cov_T = covariance(logprobs_T, advantages_T, mask_T, cu_seqlens, tokens.gather)
        if loss.loss_mode == "clip_cov":
            selected_T = covariance_band(
                cov_T, masked, loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub, seed
            )
        else:
            selected_T = covariance_top(cov_T, masked, loss.kl_cov_ratio)
    if loss.loss_mode == "gmpo":
        importance_T = sequence_geometric_mean(importance_T, mask_T, cu_seqlens)
    mode = "seq-mean-token-mean" if loss.loss_mode in SEQUENCE_LOSSES else actor.loss_agg_mode
    scale, count_B = actor.loss_scale_factor or max_response_length, tokens.counts(mask_T)
    return PolicyTargets(
        cu_seqlens=cu_seqlens,
        mask_T=mask_T,
        weight_T=tokens.weights_T(mask_T, count_B, mode, scale),
        importance_T=importance_T,
        metric_weight_T=tokens.weights_T(mask_T, count_B, "token-mean"),
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
    gather_of: GatherOf = _everything,
) -> ValueTargets:
    """Build the critic's targets of one mini-batch; arguments as in :func:`policy_targets`."""
    old, tokens = experience.old, _mini_batch_tokens(experience, indices, gather_of)
    cut = tokens.cut
    mask_T = cut(old.batch.value_mask_T) * (cut(experience.loss_weight_T) != 0)
    count_B = tokens.counts(mask_T)
    return ValueTargets(
        cu_seqlens=tokens.cu_seqlens,
        mask_T=mask_T,
        weight_T=tokens.weights_T(mask_T, count_B, critic.loss_agg_mode, max_response_length),
        metric_weight_T=tokens.weights_T(mask_T, count_B, "token-mean"),
        old_values_T=cut(old.values_T),
        returns_T=cut(experience.returns_T),
    )


@dataclass(frozen=True)
class PolicyObjective(_MiniBatchObjective[PolicyTargets]):
    """The actor's loss on a micro-batch of a mini-batch.

    ``sum_t w_t (importance_t pg_t - entropy_coeff H_t + kl_loss_coef kl_t)``

    Args:
        actor: loss mode and coefficients.
    """

    actor: ActorConfig

    def __call__(
        self, outputs: Outputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and statistics of one micro-batch.

        Args:
            outputs: the policy's current outputs, float ``[T]``; any values outside the mask.
            indices: the micro-batch's sequences, as indices of the batch.

        Returns:
            Scalar loss, part of the graph even if the mask is empty; and detached scalar sums by
            metric name. Over a mini-batch's micro-batches and data-parallel ranks both add up to
            the mini-batch's loss and metrics.
        """
        assert isinstance(outputs, PolicyOutputs)
        actor, targets = self.actor, self._select(indices)
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

        mean = partial(_metric_mean, targets)
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
    """Compute the token losses of ``actor.policy_loss.loss_mode``."""
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
class ValueObjective(_MiniBatchObjective[ValueTargets]):
    """The critic's loss on a micro-batch of a mini-batch: ``value_loss_coef sum_t w_t vf_t``.

    Args:
        critic: clip range and coefficient.
    """

    critic: CriticConfig

    def __call__(
        self, outputs: Outputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`PolicyObjective`; the metrics are of the loss without its coefficient."""
        assert isinstance(outputs, ValueOutputs)
        critic, targets = self.critic, self._select(indices)
        values_T = torch.where(targets.mask_T > 0, outputs.values_T.float(), 0.0)
        vf_T, clipped_T = value_loss(
            values_T, targets.old_values_T, targets.returns_T, critic.cliprange_value
        )
        vf_loss = (targets.weight_T * vf_T).sum()

        mean = partial(_metric_mean, targets)
        stats = {
            "critic/vf_loss": vf_loss.detach(),
            "critic/vf_clipfrac": mean(clipped_T),
            "critic/vpred_mean": mean(values_T),
            "loss/value_avg": vf_loss.detach(),
            "val/clipfrac_avg": mean(clipped_T),
        }
        return critic.value_loss_coef * vf_loss, stats
