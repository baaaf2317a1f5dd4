"""What a role's routers record, replay and report, over all its micro-batches and ranks.

Router replay: the experts of every token are recorded in one pass and taken again in later ones.
R2 records in the role's own forward-only pass; R3 takes what the rollout engine chose, in that pass
and in updating. A record holds one byte per layer, token and chosen expert (four with more than
256 experts), for the layers of this rank's pipeline stage, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from torch import Tensor

from mppo.algos.packing import sequence_token_indices
from mppo.batch import Batch
from mppo.config.sections.megatron import MegatronConfig
from mppo.models.microbatch import MicroBatch
from mppo.models.moe.construction import moe_layers
from mppo.models.moe.router import AuxiliaryLoss, MicroRouting
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.pipeline.microbatches import MicroBatchPlan

Replay = Literal["off", "R2", "R3"]


@dataclass(frozen=True)
class RoutingRecord:
    """Experts a role's own routers chose for a batch, in the layers of this rank.

    Args:
        experts: ``[L, T, k]``.
        starts: first token of each sequence, by its tokens. Equal sequences of one pass are routed
            alike, so the record serves any selection of the batch's sequences too.
    """

    experts: Tensor
    starts: dict[bytes, int]

    def of(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Experts of the tokens of some sequences, laid end to end: int64 ``[L, T', k]``."""
        where = []
        for index in indices:
            tokens = _sequence(batch, index)
            where.append(self.starts[tokens.numpy().tobytes()] + torch.arange(len(tokens)))
        if not where:
            return self.experts[:, :0].long()
        return self.experts[:, torch.cat(where)].long()

    def covers(self, batch: Batch, indices: Sequence[int]) -> bool:
        """Whether it knows all these sequences."""
        return all(_sequence(batch, i).numpy().tobytes() in self.starts for i in indices)


def record_of(batch: Batch, indices: Sequence[int], experts: Tensor) -> RoutingRecord:
    """A record of some sequences of a batch; ``experts`` is ``[L, T, k]``, over all of it."""
    starts = {_sequence(batch, i).numpy().tobytes(): int(batch.cu_seqlens[i]) for i in indices}
    return RoutingRecord(experts, starts)


def _sequence(batch: Batch, index: int) -> Tensor:
    return batch.tokens_T[batch.cu_seqlens[index] : batch.cu_seqlens[index + 1]]


class RoleRouting:
    """Routing of one role on one rank.

    Args:
        stages: the role's chunks, prepared for its routers.
        megatron: the role's section of the recipe.
        replay: which choices the update takes.
        groups: the layout's groups.
        config: Megatron's configuration; a router is recomputed with its layer only, as it would
            else see another micro-batch.
    """

    def __init__(
        self, stages, megatron: MegatronConfig, replay: Replay, groups: LayoutGroups, config
    ) -> None:
        selective = config.recompute_granularity == "selective"
        assert not (selective and "moe" in config.recompute_modules), "see override_issues"
        self._routers = [layer.router for layer in moe_layers(stages)]
        self._biased = [router for router in self._routers if router.enable_expert_bias]
        self._groups = groups
        self._config = config
        self._replay = replay
        self.losses = auxiliary_loss(megatron)
        for row, router in enumerate(self._routers):
            router.prepare(row, self.losses)
        self._record: RoutingRecord | None = None
        self._mini_batches = 0

    @property
    def records(self) -> bool:
        """Whether the forward-only pass keeps its choices (with R3 the batch brings them)."""
        return self._replay == "R2" or (self._replay == "off" and self.losses.balance > 0)

    def needs_record(self, batch: Batch, plan: MicroBatchPlan) -> bool:
        """Whether a mini-batch must be measured once more before its gradient is taken."""
        if not self.records:
            return False
        return self._record is None or not self._record.covers(batch, _planned(plan))

    def before_forward(self, batch: Batch, microbatches: Sequence[MicroBatch]) -> None:
        """Prepare a forward-only pass."""
        for microbatch in microbatches:
            routing = MicroRouting(training=False)
            if self._replay == "R3":
                routing.chosen = self._chosen(batch, microbatch)
            elif self.records:
                tokens = len(microbatch.tokens_t)
                shape = (len(self._routers), tokens, self._config.moe_router_topk)
                routing.record = torch.zeros(shape, dtype=self._dtype, device=device.device())
            microbatch.packing.routing = routing

    def after_forward(
        self, batch: Batch, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Bring together what the ranks of this pipeline stage recorded."""
        if not self.records:
            return
        topk, tokens = self._config.moe_router_topk, len(batch.tokens_T)
        experts = torch.zeros(len(self._routers), tokens, topk, dtype=self._dtype)
        for microbatch in microbatches:
            here = microbatch.packing.origin.cpu()
            real = here >= 0
            if self._reports and self._routers:
                where = sequence_token_indices(batch.cu_seqlens, microbatch.indices)[here[real]]
                experts[:, where] = microbatch.packing.routing.record.cpu()[:, real]
        if self._routers:
            experts = experts.to(device.device())
            dist.all_reduce(experts, group=_stage_group())
        self._record = record_of(batch, _planned(plan), experts.cpu())

    def before_update(
        self, batch: Batch, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Prepare a pass with gradient over one mini-batch."""
        indices = _planned(plan)
        lengths_B = batch.lengths_B[torch.tensor(indices, dtype=torch.int64)]
        load = self._load(batch, indices) if self.losses.balance and self._routers else None
        self._mini_batches += 1
        for router in self._biased:
            router.local_tokens_per_expert.zero_()
        for microbatch in microbatches:
            routing = MicroRouting(
                training=True,
                mini_batch_tokens=int(lengths_B.sum()),
                mini_batch_sequences=len(indices),
                load=None if load is None else load.to(device.device()),
            )
            if self._replay != "off":
                routing.chosen = self._chosen(batch, microbatch)
            if self.losses.sequence_balance:
                routing.num_sequences = len(microbatch.indices)
                routing.sequence_t = _sequence_of(batch, microbatch).to(device.device())
            microbatch.packing.routing = routing

    def move_expert_biases(self) -> None:
        """Move the biases towards an even load of the last pass with gradient; collective.

        ``b_e += rate * sign(mean load - load_e)`` (arXiv:2408.15664), the same on all ranks of a
        pipeline stage.
        """
        rate = self._config.moe_router_bias_update_rate
        if rate == 0 or not self._biased:
            return
        loads = torch.stack([router.local_tokens_per_expert for router in self._biased])
        biases = torch.stack([router.expert_bias for router in self._biased])
        for router, bias in zip(self._biased, get_updated_expert_bias(loads, biases, rate)):
            router.expert_bias.copy_(bias)

    def metrics(self, name: str) -> dict[str, float]:
        """Balance and replay since the last call, the same on every rank; collective.

        Args:
            name: the role's name, prefix of every metric.

        Returns:
            Per layer (``moe/layer_<n>/...``) and over layers: ``max_vio``, ``min_vio`` and
            ``avg_vio``, load of the fullest, the emptiest and the average expert relative to an
            even load, less one (in absolute value for the average); ``dropped``, share of choices
            over capacity. Over layers alone: ``replay_differing``, share of replayed choices the
            router would not have made; ``aux_loss``, mean over mini-batches of the sum over layers.
        """
        experts = self._config.num_moe_experts
        sums = torch.zeros(self._config.num_layers, experts + 4, dtype=torch.float64)
        for router in self._routers:
            if self._reports:
                sums[router.layer_number - 1] += router.load.sums.cpu()
            router.load.sums.zero_()
        sums = sums.to(device.device())
        dist.all_reduce(sums)
        sums[:, -1] /= max(self._mini_batches, 1)
        self._mini_batches = 0
        return load_metrics(sums.cpu(), self._config.moe_router_topk, name)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self._config.num_moe_experts <= 256 else torch.int32

    @property
    def _reports(self) -> bool:
        """Of ranks that route the same tokens, one reports."""
        return self._config.sequence_parallel or self._groups.coordinates.tp == 0

    def _chosen(self, batch: Batch, microbatch: MicroBatch) -> Tensor:
        experts = self._taken(batch, microbatch.indices)
        padding = experts.new_full((len(experts), 1, experts.shape[2]), -1)
        chosen = torch.cat([experts, padding], dim=1)[:, microbatch.packing.origin.cpu()]
        return chosen.to(device.device())

    def _load(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Share of the known choices on each expert: float32 ``[L, E]``."""
        experts = self._config.num_moe_experts
        taken = self._taken(batch, indices).flatten(1)
        counts = [torch.bincount(row[row >= 0], minlength=experts) for row in taken]
        return torch.stack(counts).float() / (taken[0] >= 0).sum()

    def _taken(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Choices to replay for some sequences, in the layers of this rank: int64 ``[L, T', k]``.

        Raises:
            ValueError: R3, and the batch carries no choices, or not those of this model.
        """
        if self._replay != "R3":
            assert self._record is not None, "router replay without a forward-only pass"
            return self._record.of(batch, indices)
        wanted = (self._config.num_layers, self._config.moe_router_topk)
        if tuple(batch.routed_experts_T.shape[1:]) != wanted:
            raise ValueError(
                f"actor.router_replay: R3 needs the experts the rollout engine chose in "
                f"{wanted[0]} layers, {wanted[1]} per token; the trajectories carry "
                f"{tuple(batch.routed_experts_T.shape[1:])}. Use rollout.name = sglang, or R2"
            )
        layers = [router.layer_number - 1 for router in self._routers]
        # by sequence, not by tokens: an engine may route equal responses differently near a tie
        chosen = batch.routed_experts_T[sequence_token_indices(batch.cu_seqlens, indices)]
        return chosen[:, layers].transpose(0, 1).long()


def auxiliary_loss(megatron: MegatronConfig) -> AuxiliaryLoss:
    """The losses a recipe section asks for."""
    kind, coefficient = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    return AuxiliaryLoss(
        balance=coefficient if kind == "aux_loss" else 0.0,
        sequence_balance=coefficient if kind == "seq_aux_loss" else 0.0,
        z=megatron.moe_z_loss_coeff or 0.0,
    )


def load_metrics(sums: Tensor, topk: int, name: str) -> dict[str, float]:
    """Metrics from ``[layers, E + 4]`` sums (see ``LayerLoad``); rows without tokens are left out.

    Returns:
        See ``RoleRouting.metrics``.
    """
    load, (tokens, differing, replayed, auxiliary) = sums[:, :-4], sums[:, -4:].T
    layers = tokens.nonzero()[:, 0].tolist()
    if not layers:
        return {}
    relative = load[layers] / load[layers].mean(1, keepdim=True).clamp_min(1e-9) - 1
    balance = {
        "max_vio": relative.amax(1),
        "min_vio": relative.amin(1),
        "avg_vio": relative.abs().mean(1),
        "dropped": 1 - load[layers].sum(1) / (tokens[layers] * topk),
    }
    metrics = {
        f"{name}/moe/layer_{layer}/{key}": float(values[row])
        for key, values in balance.items()
        for row, layer in enumerate(layers)
    }
    metrics |= {f"{name}/moe/{key}": float(values.mean()) for key, values in balance.items()}
    if replayed.sum():
        metrics[f"{name}/moe/replay_differing"] = float(differing.sum() / replayed.sum())
    if auxiliary.any():
        metrics[f"{name}/moe/aux_loss"] = float(auxiliary.sum())
    return metrics


def _sequence_of(batch: Batch, microbatch: MicroBatch) -> Tensor:
    """Sequence of each local token; padding gets one of its own, the last."""
    lengths = batch.lengths_B[torch.tensor(microbatch.indices, dtype=torch.int64)]
    padded = torch.cat([lengths, lengths.new_ones(1)])
    sequence_T = torch.repeat_interleave(torch.arange(len(padded)), padded)
    return sequence_T[microbatch.packing.origin.cpu()]


def _planned(plan: MicroBatchPlan) -> list[int]:
    """Every sequence of a plan."""
    return [index for share in plan for part in share for index in part]


def _stage_group() -> dist.ProcessGroup:
    """The ranks of this pipeline stage; the layout must be active."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
