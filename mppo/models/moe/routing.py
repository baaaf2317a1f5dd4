"""Recording, replay and metrics of a role's routers, over all its micro-batches and ranks.

Router replay: the experts of every token are recorded in one pass and replayed in later ones. R2
records them in the role's own forward-only pass; R3 replays the rollout engine's choices in that
pass and in the update. A record holds one byte per layer, token and chosen expert (four with more
than 256 experts), for the layers of this rank's pipeline stage, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.algos.packing import sequence_token_indices
from mppo.batch import Batch
from mppo.config.sections.megatron import MegatronConfig
from mppo.models.microbatch import MicroBatch
from mppo.models.moe.construction import routers
from mppo.models.moe.micro_routing import MicroRouting
from mppo.models.moe.router import AuxiliaryLoss
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.pipeline.microbatches import MicroBatchPlan

Replay = Literal["off", "R2", "R3"]


@dataclass(frozen=True)
class RoutingRecord:
    """Experts a role's own routers chose for a batch, in the layers of this rank.

    Args:
        experts: ``[L, T, k]``.
        starts: first token of each sequence, by the sequence's tokens as bytes. Equal sequences
            of one pass are routed equally, so the record also serves any selection of sequences.
    """

    experts: Tensor
    starts: dict[bytes, int]

    def of(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Experts of the tokens of some sequences, concatenated: int64 ``[L, T', k]``."""
        where = []
        for index in indices:
            tokens = _sequence(batch, index)
            where.append(self.starts[tokens.numpy().tobytes()] + torch.arange(len(tokens)))
        if not where:
            return self.experts[:, :0].long()
        return self.experts[:, torch.cat(where)].long()

    def covers(self, batch: Batch, indices: Sequence[int]) -> bool:
        """Whether all these sequences are recorded."""
        return all(_sequence(batch, i).numpy().tobytes() in self.starts for i in indices)


def record_of(batch: Batch, indices: Sequence[int], experts: Tensor) -> RoutingRecord:
    """Make a record of some sequences of a batch.

    Args:
        batch: the batch.
        indices: the recorded sequences.
        experts: ``[L, T, k]``, for all tokens of the batch.
    """
    starts = {_sequence(batch, i).numpy().tobytes(): int(batch.cu_seqlens[i]) for i in indices}
    return RoutingRecord(experts, starts)


def _sequence(batch: Batch, index: int) -> Tensor:
    return batch.tokens_T[batch.cu_seqlens[index] : batch.cu_seqlens[index + 1]]


class RoleRouting:
    """Routing of one role on one rank.

    Args:
        stages: this rank's chunks.
        megatron: the role's section of the recipe.
        replay: which choices the update replays.
        groups: the layout's groups.
        config: Megatron's configuration. It must not recompute a router apart from its layer, as
            the router would then read another micro-batch's packing.
    """

    def __init__(
        self,
        stages: Sequence[GPTModel],
        megatron: MegatronConfig,
        replay: Replay,
        groups: LayoutGroups,
        config: TransformerConfig,
    ) -> None:
        selective = config.recompute_granularity == "selective"
        apart = selective and "moe" in (config.recompute_modules or ())
        assert not apart, "override_issues refuses it"
        self._routers = routers(stages)
        self._biased = [router for router in self._routers if router.enable_expert_bias]
        self._groups = groups
        self._config = config
        self._replay = replay
        self.losses = auxiliary_loss(megatron)
        self._loads = [router.prepare(row, self.losses) for row, router in enumerate(self._routers)]
        self._record: RoutingRecord | None = None
        self._mini_batches = 0

    @property
    def records(self) -> bool:
        """Whether the forward-only pass records its choices (with R3 the batch carries them)."""
        return self._replay == "R2" or (self._replay == "off" and self.losses.balance > 0)

    def needs_record(self, batch: Batch, plan: MicroBatchPlan) -> bool:
        """Whether a mini-batch needs another forward-only pass before its gradient is computed."""
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
        """Combine the records of this pipeline stage's ranks. Collective."""
        if not self.records:
            return
        topk, tokens = self._config.moe_router_topk, len(batch.tokens_T)
        experts = torch.zeros(len(self._routers), tokens, topk, dtype=self._dtype)
        for microbatch in microbatches:
            routing = microbatch.packing.routing
            assert routing is not None
            if self._reports and routing.record is not None:
                origin = microbatch.packing.origin.cpu()
                real = origin >= 0
                where = sequence_token_indices(batch.cu_seqlens, microbatch.indices)[origin[real]]
                experts[:, where] = routing.record.cpu()[:, real]
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
        """Move the biases towards an even load, by the last pass with gradient; collective.

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
        """Metrics of balance and replay since the last call; collective.

        Args:
            name: the role's name, prefix of every metric.

        Returns:
            The same on every rank. Per layer (``moe/layer_<n>/...``) and as the mean over layers:
            ``max_vio``, ``min_vio`` and ``avg_vio``, the load of the most loaded, the least loaded
            and the average expert relative to an even load, minus one (in absolute value for the
            average); ``dropped``, share of choices beyond capacity. Over all layers only:
            ``replay_differing``, share of replayed choices that the router would not have made;
            ``aux_loss``, mean over mini-batches of the sum over layers.
        """
        sums = torch.zeros(self._config.num_layers, self._num_experts + 4, dtype=torch.float64)
        for layer, load in zip(self._layers, self._loads):
            if self._reports:
                sums[layer] += load.sums.cpu()
            load.sums.zero_()
        dist.all_reduce(sums)
        sums[:, -1] /= max(self._mini_batches, 1)
        self._mini_batches = 0
        return load_metrics(sums, self._config.moe_router_topk, name)

    @property
    def _num_experts(self) -> int:
        experts = self._config.num_moe_experts
        assert experts is not None, "only roles with experts have a RoleRouting"
        return experts

    @property
    def _layers(self) -> list[int]:
        """Indices of this rank's MoE layers among the model's decoder layers."""
        numbers = [router.layer_number for router in self._routers]
        return [number - 1 for number in numbers if number is not None]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self._num_experts <= 256 else torch.int32

    @property
    def _reports(self) -> bool:
        """Whether this rank reports for the tensor-parallel ranks that route the same tokens."""
        return self._config.sequence_parallel or self._groups.coordinates.tp == 0

    def _chosen(self, batch: Batch, microbatch: MicroBatch) -> Tensor:
        """Choices to replay for the local tokens of a micro-batch: int64 ``[L, t, k]``."""
        experts = self._taken(batch, microbatch.indices)
        # padding tokens, whose origin is -1, read this last row: no replay
        padding = experts.new_full((len(experts), 1, experts.shape[2]), -1)
        chosen = torch.cat([experts, padding], dim=1)[:, microbatch.packing.origin.cpu()]
        return chosen.to(device.device())

    def _load(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Each expert's share of the known choices: float32 ``[L, E]``."""
        taken = self._taken(batch, indices).flatten(1)
        counts = [torch.bincount(row[row >= 0], minlength=self._num_experts) for row in taken]
        return torch.stack(counts).float() / (taken[0] >= 0).sum()

    def _taken(self, batch: Batch, indices: Sequence[int]) -> Tensor:
        """Choices to replay for some sequences, in the layers of this rank: int64 ``[L, T', k]``.

        Raises:
            ValueError: with R3, the batch carries no choices, or those of another model.
        """
        if self._replay != "R3":
            assert self._record is not None, "router replay without a forward-only pass"
            return self._record.of(batch, indices)
        experts_T = batch.routed_experts_T
        assert experts_T is not None, "Batch fills it in"
        expected = (self._config.num_layers, self._config.moe_router_topk)
        carried = tuple(experts_T.shape[1:])
        if carried != expected:
            raise ValueError(
                "actor.router_replay: R3 needs the experts that the rollout engine chose, "
                f"[layers, experts per token] = {list(expected)}; the trajectories carry "
                f"{list(carried)}. Use rollout.name = sglang, or R2"
            )
        # by sequence, not by tokens: an engine may route equal responses differently near a tie
        chosen = experts_T[sequence_token_indices(batch.cu_seqlens, indices)]
        return chosen[:, self._layers].transpose(0, 1).long()


def auxiliary_loss(megatron: MegatronConfig) -> AuxiliaryLoss:
    """The losses that a role's section of the recipe sets."""
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
    """Index of each local token's sequence; padding counts as one more, the last."""
    lengths = batch.lengths_B[torch.tensor(microbatch.indices, dtype=torch.int64)]
    padded = torch.cat([lengths, lengths.new_ones(1)])
    sequence_T = torch.repeat_interleave(torch.arange(len(padded)), padded)
    return sequence_T[microbatch.packing.origin.cpu()]


def _planned(plan: MicroBatchPlan) -> list[int]:
    """All sequences of a plan."""
    return [index for share in plan for part in share for index in part]


def _stage_group() -> dist.ProcessGroup:
    """The ranks of this pipeline stage; the layout must be active."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return cast("dist.ProcessGroup", group)  # Megatron's globals are untyped
