"""Recording, replay and metrics of a role's routers, over all its micro-batches and ranks.

Router replay: the experts of every token are recorded in one pass and replayed in later ones. R2
records them in the role's own forward-only pass; R3 replays the rollout engine's choices in that
pass and in the update. A record holds one byte per layer, token and chosen expert (four with more
than 256 experts), for the layers of this rank's pipeline stage, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.algos.token_axis import sequence_token_indices
from mppo.batch.batch import Sequences, unknown_expert
from mppo.batch.gathers import sequence_digests
from mppo.batch.microbatches import MicroBatchPlan
from mppo.models.attention.packed_sequences import MicroRouting
from mppo.models.microbatch import MicroBatch, select_held
from mppo.models.moe.router import AuxiliaryLoss, routers
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.device import copied
from mppo.parallel.exchange import Moves, exchange
from mppo.parallel.groups import LayoutGroups
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.role_config import Replay
from mppo.safety.input_error import InputError


@dataclass(frozen=True)
class RoutingRecord:
    """Experts a role's own routers chose for a batch, in the layers of this rank.

    Sequences are known by their digests: equal sequences of one pass are routed equally, so the
    record also serves any selection of sequences. ``experts`` is ``[t, L, k]`` of each sequence
    that this data-parallel rank computed, ``holder`` the rank that computed it, ``nothing``
    ``[0, L, k]``.
    """

    experts: dict[int, Tensor]
    holder: dict[int, int]
    nothing: Tensor

    def covers(self, digests: Sequence[int]) -> bool:
        return all(digest in self.holder for digest in digests)

    def share(
        self,
        digests: Sequence[int],
        lengths: Sequence[int],
        shares: Sequence[Sequence[int]],
        place: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Bring the experts of sequences to the ranks that will replay them: ``[T', L, k]`` of this
        data-parallel rank's share, number ``place``. Collective in a stage, over the ``group`` of
        the data-parallel ranks (CPU). ``digests`` and ``lengths`` are of every sequence of a
        batch."""
        planned = sorted({number for share in shares for number in share})
        source = [0] * len(digests)
        for number in planned:
            source[number] = self.holder[digests[number]]
        held = [number for number in planned if source[number] == place]
        mine = torch.cat([self.nothing, *(self.experts[digests[number]] for number in held)])
        return exchange(Moves(source, shares), lengths, held, lambda _: [mine], group)[0]


def record_of(
    batch: Sequences, plan: MicroBatchPlan, experts: Tensor, numbers: Sequence[int], place: int
) -> RoutingRecord:
    """Make a record of this rank's sequences of a plan, whose ``experts`` are ``[T', L, k]``."""
    digests = sequence_digests(batch).tolist()
    holder: dict[int, int] = {}
    for rank, parts in enumerate(plan):
        for part in parts:
            for number in part:
                holder.setdefault(digests[number], rank)
    pieces = experts.split(batch.lengths_B[list(numbers)].tolist())
    mine = {
        digests[number]: piece
        for number, piece in zip(numbers, pieces, strict=True)
        if holder[digests[number]] == place
    }
    return RoutingRecord(mine, holder, experts[:0])


class RoleRouting:
    """Routing of one role on one rank. The configuration must not recompute a router apart from its
    layer, as the router would then read another micro-batch's packing."""

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
        self._stage_layers: list[list[int]] | None = None
        self._mini_batches = 0

    @property
    def records(self) -> bool:
        """Whether the forward-only pass records its choices (with R3 the batch carries them)."""
        return self._replay == "R2" or (self._replay == "off" and self.losses.balance > 0)

    @property
    def replays_engine(self) -> bool:
        """Whether passes replay the choices that the rollout engine made (R3)."""
        return self._replay == "R3"

    def needs_record(self, batch: Sequences, plan: MicroBatchPlan) -> bool:
        """Whether a mini-batch needs another forward-only pass before its gradient is computed."""
        if not self.records:
            return False
        digests = sequence_digests(batch)[_planned(plan)].tolist()
        return self._record is None or not self._record.covers(digests)

    def identified(self, batch: Sequences) -> Sequences:
        """The batch with its sequences' digests if a record needs them. Collective."""
        return replace(batch, digest_B=sequence_digests(batch)) if self.records else batch

    def replayed_layers(self, batch: Sequences) -> list[list[int]] | None:
        """Decoder layers whose choices of the engine each pipeline stage replays (R3); InputError
        if the batch carries none that fit. Collective on the first call."""
        if self._replay != "R3":
            return None
        self._check_choices(batch)
        if self._stage_layers is None:
            everyone = all_gather_objects((self._groups.coordinates.pp, self._layers))
            self._stage_layers = [layers for _, layers in sorted(dict(everyone).items())]
        return self._stage_layers

    def before_forward(self, batch: Sequences, microbatches: Sequence[MicroBatch]) -> None:
        carried = self._carried(batch) if self._replay == "R3" else None
        for microbatch in microbatches:
            routing = MicroRouting(training=False)
            if carried is not None:
                routing.chosen = self._chosen(*carried, microbatch)
            elif self.records:
                tokens = len(microbatch.tokens_t)
                shape = (len(self._routers), tokens, self._config.moe_router_topk)
                routing.record = torch.zeros(shape, dtype=self._dtype, device=device.device())
            microbatch.packing.routing = routing

    def after_forward(
        self, batch: Sequences, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Combine the records of the ranks that share a sequence. Collective in a stage."""
        if not self.records:
            return
        topk, tokens = self._config.moe_router_topk, len(batch.tokens_T)
        place = self._groups.coordinates.dp
        numbers = sorted(index for part in plan[place] for index in part)
        where_T = sequence_token_indices(batch.cu_seqlens, batch.places(numbers))
        experts = torch.zeros(tokens, len(self._routers), topk, dtype=self._dtype)
        for microbatch in microbatches:
            routing = microbatch.packing.routing
            assert routing is not None
            if self._reports and routing.record is not None:
                origin = microbatch.origin_t
                real = origin >= 0
                where = microbatch.tokens_in(batch)[origin[real]]
                experts[where] = routing.record.cpu()[:, real].transpose(0, 1)
        experts = experts[where_T]
        group = _group(parallel_state.get_tensor_and_context_parallel_group())
        if self._routers and group.size() > 1:
            experts = experts.to(device.device())
            dist.all_reduce(experts, group=group)
        self._record = record_of(batch, plan, experts.cpu(), numbers, place)

    def before_update(
        self, batch: Sequences, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        indices = _planned(plan)
        lengths_B = batch.lengths_B[torch.tensor(indices, dtype=torch.int64)]
        taken = load = None
        if self._replay != "off" or (self.losses.balance and self._routers):
            taken = self._taken(batch, plan)
        if taken is not None and self.losses.balance and self._routers:
            load = self._load(taken[0])
        self._mini_batches += 1
        for router in self._biased:
            router.local_tokens_per_expert.zero_()
        if load is not None:
            (load,) = copied([load])
        for microbatch in microbatches:
            routing = MicroRouting(
                training=True,
                mini_batch_tokens=int(lengths_B.sum()),
                mini_batch_sequences=len(indices),
                load=load,
            )
            if self._replay != "off" and taken is not None:
                routing.chosen = self._chosen(*taken, microbatch)
            if self.losses.sequence_balance:
                routing.num_sequences = len(microbatch.indices)
                (routing.sequence_t,) = copied([_sequence_of(batch, microbatch)])
            microbatch.packing.routing = routing

    def move_expert_biases(self) -> None:
        """Move the biases towards an even load, by the last pass with gradient:
        ``b_e += rate * sign(mean load - load_e)`` (arXiv:2408.15664), equal in a stage.
        Collective."""
        rate = self._config.moe_router_bias_update_rate
        if rate == 0 or not self._biased:
            return
        loads = torch.stack([router.local_tokens_per_expert for router in self._biased])
        biases = torch.stack([router.expert_bias for router in self._biased])
        for router, bias in zip(self._biased, get_updated_expert_bias(loads, biases, rate)):
            router.expert_bias.copy_(bias)

    def metrics(self, name: str) -> dict[str, float]:
        """Metrics of balance and replay since the last call, the same on every rank. Collective.

        Per layer (``moe/layer_<n>/...``) and as the mean over layers: ``max_vio``, ``min_vio`` and
        ``avg_vio``, the load of the most loaded, the least loaded and the average expert relative
        to an even load, minus one (in absolute value for the average); ``dropped``, share of
        choices beyond capacity. Over all layers only: ``replay_differing``, share of replayed
        choices that the router would not have made; ``aux_loss``, mean over mini-batches of the sum
        over layers.
        """
        sums = torch.zeros(self._config.num_layers, self._num_experts + 4, dtype=torch.float64)
        for layer, load in zip(self._layers, self._loads):
            if self._reports:
                sums[layer] += load.cpu()
            load.zero_()
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
        numbers = [router.layer_number for router in self._routers]
        return [number - 1 for number in numbers if number is not None]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self._num_experts <= 256 else torch.int32

    @property
    def _reports(self) -> bool:
        """Whether this rank reports for the tensor-parallel ranks that route the same tokens."""
        return self._config.sequence_parallel or self._groups.coordinates.tp == 0

    def _chosen(self, experts_T: Tensor, held: Sequences, microbatch: MicroBatch) -> Tensor:
        """Choices to replay for the local tokens of a micro-batch, int64 ``[L, t, k]``, from those
        of the tokens of ``held``, ``[T, L, k]``."""
        chosen = self._numbers(experts_T[microbatch.tokens_in(held)]).transpose(0, 1)
        # padding tokens, whose origin is -1, read this last row: no replay
        padding = chosen.new_full((len(chosen), 1, chosen.shape[2]), -1)
        padded = torch.cat([chosen, padding], dim=1)[:, microbatch.origin_t]
        # few bytes: the choices of all micro-batches may wait in pinned memory at the same time
        return copied([padded.to(torch.int16)])[0].long()

    def _numbers(self, experts_T: Tensor) -> Tensor:
        """Choices as int64, -1 where the engine's are unknown; a record has no unknown ones."""
        numbers = experts_T.long()
        if self._replay == "R3":
            numbers[experts_T == unknown_expert(experts_T.dtype)] = -1
        return numbers

    def _load(self, experts_T: Tensor) -> Tensor:
        """Each expert's share of the known choices of a mini-batch, float32 ``[L, E]``, from those
        of this rank's sequences ``[T', L, k]``. Collective in a stage."""

        def count(row: Tensor) -> Tensor:
            return torch.bincount(row[row >= 0], minlength=self._num_experts)

        # a layer at a time, since the choices take eight bytes as int64
        counts = torch.stack([count(self._numbers(layer)) for layer in experts_T.unbind(1)])
        sums = torch.cat([counts.flatten(), counts[:1].sum()[None]])
        if self._groups.layout.dp > 1:
            dist.all_reduce(sums, group=_group(parallel_state.get_data_parallel_group_gloo()))
        return sums[:-1].view_as(counts).float() / sums[-1]

    def _taken(self, batch: Sequences, plan: MicroBatchPlan) -> tuple[Tensor, Sequences]:
        """Choices ``[T', L, k]`` to replay for this rank's sequences of a plan, and these
        sequences. Collective in a stage."""
        place = self._groups.coordinates.dp
        shares = [sorted(index for part in parts for index in part) for parts in plan]
        share = select_held(batch, shares[place])
        if self._replay == "R3":
            experts_T, _ = self._carried(share)
            return experts_T, share
        assert self._record is not None, "router replay without a forward-only pass"
        digests, lengths = sequence_digests(batch).tolist(), batch.lengths_B.tolist()
        group = _group(parallel_state.get_data_parallel_group_gloo())
        return self._record.share(digests, lengths, shares, place, group), share

    def _carried(self, batch: Sequences) -> tuple[Tensor, Sequences]:
        """The engine's choices in the layers of this rank, ``[T, L, k]``, and the batch."""
        if batch.expert_layers is None:
            self._check_choices(batch)
            return batch.routed_experts_T[:, self._layers], batch
        assert list(batch.expert_layers) == self._layers
        return batch.routed_experts_T, batch

    def _check_choices(self, batch: Sequences) -> None:
        """Raise InputError unless the batch carries the engine's choices for this model."""
        expected = (self._config.num_layers, self._config.moe_router_topk)
        carried = tuple(batch.routed_experts_T.shape[1:])
        if carried != expected:
            raise InputError(
                "actor.router_replay: R3 needs the experts that the rollout engine chose, "
                f"[layers, experts per token] = {list(expected)}; the episodes carry "
                f"{list(carried)}. Use rollout.name = sglang, or R2"
            )


def auxiliary_loss(megatron: MegatronConfig) -> AuxiliaryLoss:
    kind, coefficient = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    return AuxiliaryLoss(
        balance=coefficient if kind == "aux_loss" else 0.0,
        sequence_balance=coefficient if kind == "seq_aux_loss" else 0.0,
        z=megatron.moe_z_loss_coeff or 0.0,
    )


def load_metrics(sums: Tensor, topk: int, name: str) -> dict[str, float]:
    """``RoleRouting.metrics`` from ``[layers, E + 4]`` sums (see ``Router.load``); rows without
    tokens are left out."""
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


def _sequence_of(batch: Sequences, microbatch: MicroBatch) -> Tensor:
    """Index of each local token's sequence; padding counts as one more, the last."""
    lengths = batch.lengths_B[torch.tensor(microbatch.indices, dtype=torch.int64)]
    padded = torch.cat([lengths, lengths.new_ones(1)])
    sequence_T = torch.repeat_interleave(torch.arange(len(padded)), padded)
    return sequence_T[microbatch.origin_t]


def _planned(plan: MicroBatchPlan) -> list[int]:
    return [index for share in plan for part in share for index in part]


def _group(group: object) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", group)  # Megatron's globals are untyped
