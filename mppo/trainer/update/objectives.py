"""The objectives that the last pipeline stage evaluates for one micro-batch.

An objective selects the sequences of its micro-batch from the mini-batch's targets, whose weights
contain the normaliser. The losses and statistics of any division into micro-batches and ranks
therefore add up to the mini-batch's: sum them and divide by nothing.

Shapes: ``T`` tokens of complete sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic

import torch
from torch import Tensor

from mppo import register
from mppo.algos.kl import kl_estimate
from mppo.algos.policy_loss import Loss, LossInputs, importance_ratio, outside_trust_region
from mppo.algos.value_loss import bin_edges, hl_gauss_loss, value_loss
from mppo.batch.head_outputs import HeadOutputs, PolicyOutputs, ValueOutputs
from mppo.recipe.sections.algorithm import RolloutCorrectionConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig, HLGaussConfig
from mppo.safety.input_error import InputError
from mppo.trainer.advantages import bounded_importance
from mppo.trainer.targets import PolicyTargets, Targets, ValueTargets, on_device, select_targets

_POLICY_STATISTICS = (
    "actor/pg_loss", "actor/entropy", "actor/pg_clipfrac", "actor/pg_clipfrac_lower",
    "actor/ppo_kl", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
    "loss/policy_avg", "val/ratio",
)  # fmt: skip
_SIDES = ("actor/masked_below", "actor/masked_above")
"""Statistics of the loss ``dis``: the shares of tokens on either side of its trust region."""
_VALUE_STATISTICS = (
    "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "loss/value_avg",
    "val/clipfrac_avg",
)  # fmt: skip
_HISTOGRAM_STATISTICS = (
    "critic/vf_loss", "critic/vf_outside_range", "critic/vpred_mean", "loss/value_avg",
)  # fmt: skip


@dataclass(frozen=True)
class _MiniBatchObjective(Generic[Targets]):
    """An objective over the micro-batches of one mini-batch; ``sequences`` are those of the
    targets, as indices of the batch, in their order."""

    targets: Targets
    sequences: tuple[int, ...]

    @cached_property
    def _on_device(self) -> Targets:
        return on_device(self.targets)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {index: position for position, index in enumerate(self.sequences)}

    def _select(self, indices: Sequence[int]) -> Targets:
        return select_targets(self._on_device, [self._position[index] for index in indices])


def _metric_mean(targets: PolicyTargets | ValueTargets, x_T: Tensor) -> Tensor:
    """A micro-batch's part of the mini-batch's token mean: a detached scalar."""
    return (targets.metric_weight_T * x_T).sum().detach()


@dataclass(frozen=True)
class PolicyObjective(_MiniBatchObjective[PolicyTargets]):
    """The actor's loss on a micro-batch of a mini-batch.
    ``sum_t w_t (importance_t pg_t - entropy_coeff H_t + kl_loss_coef kl_t)``, and
    ``positive_nll_coef`` times the mean of ``-log pi`` over the tokens of responses whose score is
    above 0. ``correction`` weighs the loss ``reinforce``."""

    actor: ActorConfig
    correction: RolloutCorrectionConfig

    @property
    def statistics(self) -> tuple[str, ...]:
        names = _POLICY_STATISTICS
        if self.actor.policy_loss.loss_mode == "dis":
            names = (*names, *_SIDES)
        if self.actor.positive_nll_coef:
            names = (*names, "actor/positive_nll")
        return (*names, "actor/kl_loss") if self.actor.use_kl_loss else names

    def __call__(
        self, outputs: HeadOutputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and statistics of one micro-batch, whose sequences are indices of the
        batch, from outputs ``[T]`` (any values outside the mask). The scalar loss is part of the
        graph even if the mask is empty; statistics are detached scalar sums. Over a mini-batch's
        micro-batches and data-parallel ranks both add up to its loss and metrics."""
        assert isinstance(outputs, PolicyOutputs)
        actor, targets = self.actor, self._select(indices)
        inside_T = targets.mask_T > 0
        logprobs_T = torch.where(inside_T, outputs.logprobs_T.float(), 0.0)
        entropy_T = torch.where(inside_T, outputs.entropy_T.float(), 0.0)
        ratio_T, log_ratio_T = importance_ratio(logprobs_T, targets.old_logprobs_T)
        pg_T, clipped_T, dual_clipped_T = policy_loss(
            logprobs_T, ratio_T, log_ratio_T, targets, actor, self.correction
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
        if actor.policy_loss.loss_mode == "dis":
            sides = outside_trust_region(ratio_T.detach(), *clip_range(actor))
            stats |= {name: mean(side_T) for name, side_T in zip(_SIDES, sides, strict=True)}
        if actor.positive_nll_coef:
            nll = -(targets.positive_weight_T * logprobs_T).sum()
            loss = loss + actor.positive_nll_coef * nll
            stats["actor/positive_nll"] = nll.detach()
        if actor.use_kl_loss:
            full_kl_T = outputs.full_kl_T
            if full_kl_T is not None:
                full_kl_T = torch.where(inside_T, full_kl_T.float(), 0.0)
            kl_T = kl_estimate(logprobs_T, targets.ref_logprobs_T, actor.kl_loss_type, full_kl_T)
            kl_loss = (targets.weight_T * kl_T).sum()
            loss = loss + actor.kl_loss_coef * kl_loss
            stats["actor/kl_loss"] = kl_loss.detach()
        return loss, stats


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """The clip ranges below and above 1: ``clip_ratio`` where they are null."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return (actor.clip_ratio if low is None else low, actor.clip_ratio if high is None else high)


def policy_loss(
    logprobs_T: Tensor,
    ratio_T: Tensor,
    log_ratio_T: Tensor,
    targets: PolicyTargets,
    actor: ActorConfig,
    correction: RolloutCorrectionConfig,
) -> Loss:
    low, high = clip_range(actor)
    options = actor.policy_loss
    importance_T = None
    if options.loss_mode == "reinforce" and correction.rollout_is != "off":
        importance_T = bounded_importance(
            log_ratio_T.detach(), targets.mask_T, targets.cu_seqlens, correction
        )
    inputs = LossInputs(
        logprobs_T=logprobs_T,
        old_logprobs_T=targets.old_logprobs_T,
        ratio_T=ratio_T,
        log_ratio_T=log_ratio_T,
        advantages_T=targets.advantages_T,
        mask_T=targets.mask_T,
        cu_seqlens=targets.cu_seqlens,
        selected_T=targets.selected_T,
        low=low,
        high=high,
        dual_clip=actor.clip_ratio_c,
        tau_pos=options.tau_pos,
        tau_neg=options.tau_neg,
        kl_coef=options.ppo_kl_coef,
        dro_beta=options.dro_beta,
        importance_T=importance_T,
    )
    found = register.policy_loss[options.loss_mode](inputs)
    parts = found if isinstance(found, tuple) else (found,)
    shapes = [getattr(each, "shape", None) for each in parts]
    if shapes != [logprobs_T.shape] * 3:
        why = f"returned {shapes}, not three tensors of {len(logprobs_T)} tokens"
        fix = "return mppo.algos.policy_loss.with_indicators(loss_T)"
        raise InputError(f"the policy loss {options.loss_mode!r} {why}; {fix}")
    return found


@dataclass(frozen=True)
class ValueObjective(_MiniBatchObjective[ValueTargets]):
    """The critic's loss on a micro-batch of a mini-batch: ``value_loss_coef sum_t w_t vf_t``."""

    critic: CriticConfig

    @property
    def statistics(self) -> tuple[str, ...]:
        return _VALUE_STATISTICS if self.critic.histogram is None else _HISTOGRAM_STATISTICS

    def __call__(
        self, outputs: HeadOutputs, indices: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The metrics are of the loss without its coefficient."""
        assert isinstance(outputs, ValueOutputs)
        critic, targets = self.critic, self._select(indices)
        values_T = torch.where(targets.mask_T > 0, outputs.values_T.float(), 0.0)
        mean = partial(_metric_mean, targets)
        if critic.histogram is not None:
            vf_T, outside_T = self._histogram_loss(outputs, targets, critic.histogram)
            shares = {"critic/vf_outside_range": mean(outside_T)}
        else:
            vf_T, clipped_T = value_loss(
                values_T, targets.old_values_T, targets.returns_T, critic.cliprange_value
            )
            clipped = mean(clipped_T)
            shares = {"critic/vf_clipfrac": clipped, "val/clipfrac_avg": clipped}
        vf_loss = (targets.weight_T * vf_T).sum()
        stats = {
            "critic/vf_loss": vf_loss.detach(),
            "critic/vpred_mean": mean(values_T),
            "loss/value_avg": vf_loss.detach(),
            **shares,
        }
        return critic.value_loss_coef * vf_loss, stats

    def _histogram_loss(
        self, outputs: ValueOutputs, targets: ValueTargets, histogram: HLGaussConfig
    ) -> tuple[Tensor, Tensor]:
        """Loss of the tokens, and 1 where the return is outside the histogram's range."""
        assert outputs.logits_KT is not None, "a pass with gradients has logits"
        logits_KT = torch.where(targets.mask_T > 0, outputs.logits_KT, 0.0)
        edges = bin_edges(histogram.min, histogram.max, histogram.bins).to(logits_KT.device)
        sigma = histogram.sigma_ratio * (histogram.max - histogram.min) / histogram.bins
        return hl_gauss_loss(logits_KT, targets.returns_T, edges, sigma)
