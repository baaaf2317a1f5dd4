"""A role: a model in its own layout, with its optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.microbatches import MicroBatchLimits, MicroBatchPlan, MicroBatchSpec
from mppo.batch.mini_batch import TOKENS_ONLY, PassInputs
from mppo.models.attention.context import ContextPlace
from mppo.models.configuration import DTYPES, transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.heads.role_head import RoleHead
from mppo.models.microbatch import MicroBatch, cut
from mppo.models.moe.router import freeze_routers
from mppo.models.moe.routing import RoleRouting
from mppo.models.optimizer import RoleOptimizer, StepResult, wrap_in_ddp
from mppo.models.role_weights import RoleWeights
from mppo.models.stage import Stage, build_stages
from mppo.models.work_share import PassMoves, fetch_share
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.recipe.model_shape import model_shape, with_value_bins
from mppo.recipe.sections.role_config import RoleConfig
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.frozen import freeze_parameters
from mppo.weights.table import parameter_table


class Role:
    """A role's Megatron model: this rank's part of it in the role's layout.

    Args:
        folder: the initial weights: a Hugging Face folder or a Megatron checkpoint.
        total_steps: number of PPO steps of the run, for the learning rate.

    Attributes:
        token_budget: most tokens per GPU of a micro-batch, with ``use_dynamic_bsz``.
        loss: of the mini-batch whose gradient is accumulated, the same on every rank.
    """

    def __init__(
        self,
        settings: RoleConfig,
        folder: Path,
        hf_config: Any,
        groups: LayoutGroups,
        total_steps: int = 1,
    ) -> None:
        self.settings, self.groups, self.layout = settings, groups, groups.layout
        hf_config = with_value_bins(hf_config, settings.value_bins)
        self.folder, self.hf_config, self.dtype = folder, hf_config, DTYPES[settings.dtype]
        device.prepare_dtype(self.dtype)
        family = family_config(hf_config)
        vocab_size = family.gpt_kwargs["vocab_size"]
        with groups.active():
            self.config = transformer_config(
                family, settings.megatron, self.layout, self.dtype, trained=settings.trained
            )
            padded_vocab = padded_vocab_size(vocab_size, self.layout.tp)
            self.stages: list[Stage] = build_stages(
                family,
                self.config,
                self.layout,
                padded_vocab,
                groups.coordinates.pp,
                settings.head,
                settings.value_bins,
            )
            self.weights = RoleWeights(self.stages, hf_config, groups, settings, folder)
            self._freeze()
            self._prepare_routers()
            self.chunks: Sequence[torch.nn.Module] = self.stages
            self.optimizer: RoleOptimizer | None = None
            if settings.optim is not None:
                replicas = self.layout.dp * self.layout.cp
                self.chunks = wrapped = wrap_in_ddp(self.stages, settings.megatron, replicas)
                self.optimizer = RoleOptimizer(
                    wrapped, settings.optim, settings.megatron, self.dtype, total_steps
                )
            else:
                for stage in self.stages:
                    stage.requires_grad_(False)
        self.head = RoleHead(self.stages[-1], settings, groups, vocab_size)
        self.token_budget = settings.batching.token_budget
        self.loss = 0.0

    def _freeze(self) -> None:
        if self.settings.freeze:
            table = parameter_table(model_shape(self.hf_config))
            freeze_parameters(self.stages, table, self.settings.freeze)

    def _prepare_routers(self) -> None:
        settings = self.settings
        if settings.megatron.freeze_moe_router:
            for stage in self.stages:
                freeze_routers(stage)
        self.routing: RoleRouting | None = None
        if self.config.num_moe_experts:
            self.routing = RoleRouting(
                self.stages, settings.megatron, settings.router_replay, self.groups, self.config
            )

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def token_multiple(self) -> int:
        """Divisor of a rank's token count in every micro-batch."""
        return self.layout.tp if self.config.sequence_parallel else 1

    def is_last_chunk(self, chunk: int) -> bool:
        return self.groups.is_last_stage and chunk == self.layout.vpp - 1

    def micro_batch_spec(self, training: bool) -> MicroBatchSpec:
        batching = self.settings.batching
        sequences = batching.ppo_micro_batch_size_per_gpu
        tokens = self.token_budget
        if not training:
            sequences = batching.log_prob_micro_batch_size_per_gpu or sequences
            tokens = batching.log_prob_max_token_len_per_gpu or tokens
        tokens = tokens * self.layout.cp if batching.use_dynamic_bsz else None
        limits = MicroBatchLimits(sequences, tokens)
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return MicroBatchSpec(self.layout.dp, multiple, limits)

    def plan(self, batch: Sequences, training: bool) -> MicroBatchPlan:
        return self.micro_batch_spec(training).plan(batch.lengths_B.tolist())

    def predicted_B(self, batch: Sequences) -> Tensor:
        """Number of tokens of each sequence that pass the head: int64 ``[B]``."""
        return batch.response_B + batch.end_B if self.settings.head == "value" else batch.response_B

    def predicted_mask_T(self, batch: Sequences) -> Tensor:
        """1 on the tokens for which the head gives a value or log-probability, float32 ``[T]``."""
        return batch.value_mask_T if self.settings.head == "value" else batch.response_mask_T

    def fetch(
        self, batch: Sequences, plan: MicroBatchPlan, inputs: PassInputs = TOKENS_ONLY
    ) -> tuple[Sequences, PassInputs]:
        """Bring the sequences of a pass and its inputs to the ranks of the plan. Collective."""
        layers = None
        if self.routing is not None:
            batch = self.routing.identified(batch)
            layers = self.routing.replayed_layers(batch)
        return fetch_share(batch, PassMoves(self.layout, plan, batch), inputs, layers)

    def begin_forward(self, batch: Sequences, plan: MicroBatchPlan) -> list[MicroBatch]:
        """Prepare a forward-only pass; return this rank's micro-batches."""
        with self.groups.active():
            for stage in self.stages:
                stage.eval()
            microbatches = self.cut(batch, plan)
            if self.routing:
                self.routing.before_forward(batch, microbatches)
        return microbatches

    def end_forward(
        self, batch: Sequences, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Store the expert choices that the routers recorded in the pass. Collective."""
        if self.routing:
            with self.groups.active():
                self.routing.after_forward(batch, plan, microbatches)

    def routing_metrics(self) -> dict[str, float]:
        """Metrics of expert balance and router replay since the last call. Collective."""
        return self.routing.metrics(self.name) if self.routing else {}

    def cut(self, batch: Sequences, plan: MicroBatchPlan) -> list[MicroBatch]:
        mine = plan[self.groups.coordinates.dp]
        context = None
        if self.layout.cp > 1:
            context = ContextPlace(self.layout.cp, self.groups.coordinates.cp)
        merge = not self.stages[0].uses_transformer_engine
        mask_T = self.predicted_mask_T(batch)
        return [
            cut(batch, indices, self.token_multiple, mask_T, context, merge) for indices in mine
        ]

    def message_shape(self, microbatch: MicroBatch) -> tuple[int, int, int]:
        """Shape of a micro-batch's hidden states between two stages: ``[t, 1, hidden]``; under
        sequence parallelism ``[t / tp, 1, hidden]``."""
        return len(microbatch.tokens_t) // self.token_multiple, 1, self.config.hidden_size

    def message_buffer(self, microbatch: MicroBatch) -> Tensor:
        """Allocate a tensor on the device for a micro-batch's hidden states, or their gradient."""
        shape = self.message_shape(microbatch)
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=device.device())

    def start_statistics(
        self,
        parts: Sequence[tuple[Tensor, dict[str, Tensor]]],
        names: tuple[str, ...],
        stop: bool = False,
    ) -> PendingStatistics:
        """Start to sum loss and statistics over the micro-batches of all ranks; ``stop``: this rank
        wants to end the update early."""
        assert all(stats.keys() == set(names) for _, stats in parts), f"statistics of {self.name}"
        totals = torch.zeros(2 + len(names), dtype=torch.float64)
        if self.groups.is_reporting_rank:
            rows = [
                torch.stack([loss.detach().double(), *(stats[n].double() for n in names)])
                for loss, stats in parts
            ]
            for row in torch.stack(rows).cpu():  # one copy for all micro-batches
                totals[1:] += row
        totals[0] = stop
        # on the CPU: an NCCL kernel would occupy the GPU until the slowest rank joins
        work = cast("dist.Work", dist.all_reduce(totals, async_op=True))
        return PendingStatistics(self, names, totals, work)

    def take_step(self, norm: float) -> None:
        """Clip the accumulated gradient of norm ``norm``, and update the weights;
        ``RoleOptimizer.wait_for_weights`` comes before their use."""
        assert self.optimizer is not None, f"{self.name} is frozen"
        with self.groups.active():
            self.optimizer.apply(norm)
            if self.routing:
                self.routing.move_expert_biases()
        if self.weights.average is not None:
            self.optimizer.wait_for_weights()
            self.weights.average.update()


@dataclass
class PendingStatistics:
    """Loss and statistics of a mini-batch while ranks sum them: float64 ``[2 + statistics]`` (CPU),
    the number of ranks that want to end the update early, loss, statistics."""

    role: Role
    names: tuple[str, ...]
    totals: Tensor
    work: dist.Work
    stop: bool = False

    def wait(self) -> dict[str, float]:
        """Wait; set the role's ``loss``, return the summed statistics, equal on all ranks."""
        self.work.wait()
        stopping, self.role.loss, *sums = self.totals.tolist()
        self.stop = stopping > 0
        return dict(zip(self.names, sums, strict=True))


def step_together(roles: Sequence[Role]) -> dict[str, StepResult]:
    norms = {}
    for role in roles:
        assert role.optimizer is not None, f"{role.name} is frozen"
        with role.groups.active():
            norms[role.name] = role.optimizer.start_norm().wait()
    results = take_steps(roles, norms)
    for role in roles:
        assert role.optimizer is not None
        role.optimizer.wait_for_weights()
    return results


def take_steps(roles: Sequence[Role], norms: Mapping[str, float]) -> dict[str, StepResult]:
    """Take the optimizer steps of all roles, or of none if any loss or gradient is not finite;
    ``RoleOptimizer.wait_for_weights`` comes before the use of a role's weights."""
    numbers = [*norms.values(), *(role.loss for role in roles)]
    finite = all(math.isfinite(number) for number in numbers)
    for role in roles if finite else ():
        role.take_step(norms[role.name])
    return {role.name: StepResult(role.loss, norms[role.name], finite) for role in roles}
