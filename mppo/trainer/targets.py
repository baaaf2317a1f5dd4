"""The targets of a mini-batch's losses, built once per mini-batch.

The weight of each token already contains the mini-batch's normaliser.

Shapes: ``T`` tokens of complete sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algos.aggregation import aggregation_weights_T
from mppo.algos.covariance import MiniBatchTokens, covariance, covariance_band, covariance_top
from mppo.algos.masked import ALONE, Gather, expand_to_tokens, sequence_sum
from mppo.algos.rollout_correction import sequence_geometric_mean
from mppo.algos.token_axis import (
    cumulative,
    select_cu_seqlens,
    select_sequences,
    sequence_token_indices,
)
from mppo.batch.batch import Sequences
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.outputs import Experience
from mppo.models.work_share import PassMoves
from mppo.parallel.device import copied
from mppo.parallel.exchange import exchange
from mppo.parallel.layout import Layout
from mppo.recipe.sections.roles import SEQUENCE_LOSSES, ActorConfig, CriticConfig
from mppo.trainer.advantages import value_states


@dataclass(frozen=True)
class PolicyTargets:
    """Targets of the policy's loss, on one flat token axis of complete sequences.

    Args:
        mask_T: float32, 1 on the tokens trained on (response tokens not rejected).
        weight_T: float32, each token's share in the mini-batch's loss (aggregation).
        importance_T: float32, rollout-correction weight of the token's policy loss; for GMPO equal
            on all tokens of a sequence.
        metric_weight_T: float32, 1 / (masked tokens of the mini-batch) on the mask.
        selected_T: float32, 1 on the tokens that Clip-Cov or KL-Cov selected, else 0.
        positive_weight_T: float32, 1 / (tokens of the mini-batch's responses whose score is
            above 0) on these tokens, else 0.
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
    positive_weight_T: Tensor


@dataclass(frozen=True)
class ValueTargets:
    """Targets of the critic's loss, float32 ``[T]``: values before the update, and returns."""

    cu_seqlens: Tensor
    mask_T: Tensor
    weight_T: Tensor
    metric_weight_T: Tensor
    old_values_T: Tensor
    returns_T: Tensor


Targets = TypeVar("Targets", PolicyTargets, ValueTargets)


def on_device(targets: Targets) -> Targets:
    """Copy the targets' tokens to this rank's device; ``cu_seqlens`` stays on the CPU."""
    names = _per_token(targets)
    moved = copied([getattr(targets, name) for name in names])
    return replace(targets, **dict(zip(names, moved, strict=True)))


def select_targets(targets: Targets, indices: Sequence[int]) -> Targets:
    """Select sequences by their position in ``targets``, in the order of ``indices``; also
    ``cu_seqlens`` is then on this rank's device."""
    where_T = sequence_token_indices(targets.cu_seqlens, indices)
    where_T, cu_seqlens = copied([where_T, select_cu_seqlens(targets.cu_seqlens, indices)])
    changes = {name: getattr(targets, name)[where_T] for name in _per_token(targets)}
    return replace(targets, cu_seqlens=cu_seqlens, **changes)


def _per_token(targets: PolicyTargets | ValueTargets) -> list[str]:
    return [field.name for field in fields(targets) if field.name != "cu_seqlens"]


@dataclass(frozen=True)
class _MiniBatchTokens:
    """The tokens of a mini-batch that this rank holds. ``cut`` maps ``[T]`` of the batch to float32
    ``[T]`` of the mini-batch; ``position_H`` are positions in the mini-batch; ``episode_B`` places
    of the sequences' episodes among those of the mini-batch."""

    cu_seqlens: Tensor
    cut: Callable[[Tensor], Tensor]
    position_H: Tensor
    gather: Gather
    episode_B: Tensor

    def weights_T(self, mask_T: Tensor, count_E: Tensor, mode: str, scale: float = 1.0) -> Tensor:
        count_H = count_E[self.episode_B[self.position_H]]
        return aggregation_weights_T(mask_T, self.cu_seqlens, mode, scale, count_E, count_H)

    def counts(self, mask_T: Tensor) -> Tensor:
        """Masked tokens of each episode of the mini-batch: float32 ``[E]``. Collective."""
        count_B = self.gather.sequences(sequence_sum(mask_T, self.cu_seqlens))
        episodes = int(self.episode_B.max()) + 1 if len(self.episode_B) else 0
        return count_B.new_zeros(episodes).index_add_(0, self.episode_B, count_B)


GatherOf = Callable[[Sequence[int] | Tensor], tuple[Gather, Tensor]]
"""See ``batch.gathers.gather_of_mini_batch``, for one batch."""


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

    cu_seqlens = select_cu_seqlens(batch.cu_seqlens, places)
    _, episode_B = torch.unique(batch.episode_B[torch.as_tensor(indices)], return_inverse=True)
    return _MiniBatchTokens(cu_seqlens, cut, position_H, gather, episode_B)


def policy_targets(
    experience: Experience,
    indices: Sequence[int] | Tensor,
    actor: ActorConfig,
    max_response_length: int,
    seed: int = 0,
    gather_of: GatherOf = _everything,
) -> PolicyTargets:
    """Build the policy's targets of one mini-batch, for the sequences held here, float32.

    Collective if sequences are shared out. A token whose ``loss_weight_T`` is 0 (rejected) counts
    neither in the mask nor in the normalisers. ``max_response_length`` is the scale of
    ``seq-mean-token-sum-norm`` if ``loss_scale_factor`` is null; ``seed`` that of Clip-Cov's
    selection; ``gather_of`` makes the mini-batch's ``Gather``, by default of sequences all held.
    """
    old, tokens = experience.old, _mini_batch_tokens(experience, indices, gather_of)
    batch, cut, cu_seqlens = old.batch, tokens.cut, tokens.cu_seqlens
    importance_T = cut(experience.loss_weight_T)
    mask_T = cut(batch.response_mask_T) * (importance_T != 0)
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
    is_positive_T = expand_to_tokens(batch.here(batch.scores_B) > 0, batch.cu_seqlens)
    positive_T = mask_T * cut(is_positive_T)
    scale, count_E = actor.loss_scale_factor or max_response_length, tokens.counts(mask_T)
    return PolicyTargets(
        cu_seqlens=cu_seqlens,
        mask_T=mask_T,
        weight_T=tokens.weights_T(mask_T, count_E, mode, scale),
        importance_T=importance_T,
        metric_weight_T=tokens.weights_T(mask_T, count_E, "token-mean"),
        old_logprobs_T=logprobs_T,
        ref_logprobs_T=cut(old.ref_logprobs_T),
        advantages_T=advantages_T,
        selected_T=selected_T,
        positive_weight_T=tokens.weights_T(positive_T, tokens.counts(positive_T), "token-mean"),
    )


def value_targets(
    experience: Experience,
    indices: Sequence[int] | Tensor,
    critic: CriticConfig,
    max_response_length: int,
    gather_of: GatherOf = _everything,
    gae_unit: str = "token",
) -> ValueTargets:
    """Build the critic's targets of one mini-batch, as :func:`policy_targets`; with ``gae_unit``
    ``turn``, only the first token of a turn counts."""
    old, tokens = experience.old, _mini_batch_tokens(experience, indices, gather_of)
    cut = tokens.cut
    mask_T = cut(value_states(old.batch, gae_unit)) * (cut(experience.loss_weight_T) != 0)
    count_E = tokens.counts(mask_T)
    return ValueTargets(
        cu_seqlens=tokens.cu_seqlens,
        mask_T=mask_T,
        weight_T=tokens.weights_T(mask_T, count_E, critic.loss_agg_mode, max_response_length),
        metric_weight_T=tokens.weights_T(mask_T, count_E, "token-mean"),
        old_values_T=cut(old.values_T),
        returns_T=cut(experience.returns_T),
    )


def fetch_targets(
    targets: Targets,
    sequences: Sequence[int],
    batch: Sequences,
    plan: MicroBatchPlan,
    layout: Layout,
) -> tuple[Targets, tuple[int, ...]]:
    """Bring the targets of the sequences held here, in their order, to the ranks that compute the
    loss; return those whose loss this rank computes, and their indices. Collective."""
    if batch.is_replicated:
        return targets, tuple(sequences)
    places = PassMoves(layout, plan, batch)
    moves, alike = places.outward(last_stage_only=True), places.alike(by_stage=True)
    names = [f.name for f in fields(targets) if f.name.endswith("_T")]
    tensors = [getattr(targets, name) for name in names]
    lengths = batch.lengths_B.tolist()
    got = exchange(moves, lengths, sequences, lambda _: tensors, alike=alike)
    mine = moves.wanted[dist.get_rank()]
    changes = dict(zip(names, got, strict=True))
    return replace(targets, cu_seqlens=cumulative(batch.lengths_B[mine]), **changes), tuple(mine)
