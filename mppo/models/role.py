"""A role: a model in its own layout, and its passes: forward, forward-backward, optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Batch
from mppo.models.attention.context import ContextPlace
from mppo.models.configuration import transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.heads.outputs import Outputs, num_outputs, stack_outputs, unstack_outputs
from mppo.models.heads.role_head import RoleHead
from mppo.models.microbatch import MicroBatch, cut
from mppo.models.moe.construction import freeze_routers
from mppo.models.moe.routing import RoleRouting
from mppo.models.optimizer import RoleOptimizer, StepResult, wrap_in_ddp
from mppo.models.role_spec import TOKENS_ONLY, MiniBatch, PassInputs, RoleSpec
from mppo.models.role_weights import RoleWeights
from mppo.models.stage import Stage, build_stages
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.groups import LayoutGroups
from mppo.pipeline.microbatches import MicroBatchLimits, MicroBatchPlan, MicroBatchSpec
from mppo.pipeline.sequential import run_pipeline
from mppo.weights.blocks import padded_vocab_size

_EXCHANGED_ROWS = 8192
"""Tokens whose hidden states are on the device at one time while ranks exchange them."""


class Role:
    """A Megatron model on this rank's part of a layout.

    Args:
        spec: how to build it.
        hf_config: transformers config of ``spec.folder``.
        groups: the layout's process groups.

    Attributes:
        weights: its parameters: streamed, saved, averaged.
        head: from hidden states to outputs.
        loss: of the mini-batch whose gradient is accumulated, the same on every rank.
    """

    def __init__(self, spec: RoleSpec, hf_config, groups: LayoutGroups) -> None:
        self.spec, self.groups, self.layout = spec, groups, groups.layout
        self.hf_config = hf_config
        device.prepare_dtype(spec.dtype)
        family = family_config(hf_config)
        vocab_size = family.gpt_kwargs["vocab_size"]
        with groups.active():
            self.config = transformer_config(
                family, spec.megatron, self.layout, spec.dtype, trained=spec.optim is not None
            )
            padded_vocab = padded_vocab_size(vocab_size, self.layout.tp)
            self.stages: list[Stage] = build_stages(
                family, self.config, self.layout, padded_vocab, groups.coordinates.pp, spec.head
            )
            self.weights = RoleWeights(self.stages, hf_config, groups, spec.folder, spec.ema_decay)
            self._prepare_routers()
            self.chunks: Sequence[torch.nn.Module] = self.stages
            self.optimizer: RoleOptimizer | None = None
            if spec.optim is not None:
                self.chunks = wrapped = wrap_in_ddp(self.stages, spec.megatron)
                self.optimizer = RoleOptimizer(
                    wrapped, spec.optim, spec.megatron, spec.dtype, spec.total_steps
                )
            else:
                for stage in self.stages:
                    stage.requires_grad_(False)
        self.head = RoleHead(self.stages[-1], spec, groups, vocab_size)
        self.loss = 0.0
        self._stat_names: list[str] | None = None

    def _prepare_routers(self) -> None:
        """Freeze the routers where the recipe says so, and follow their choices of experts."""
        spec = self.spec
        if spec.megatron.freeze_moe_router:
            for stage in self.stages:
                freeze_routers(stage)
        self.routing: RoleRouting | None = None
        if self.config.num_moe_experts:
            self.routing = RoleRouting(
                self.stages, spec.megatron, spec.router_replay, self.groups, self.config
            )

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.name

    @property
    def token_multiple(self) -> int:
        """A rank's token counts of micro-batches are multiples of this."""
        return self.layout.tp if self.config.sequence_parallel else 1

    def micro_batch_spec(self, training: bool) -> MicroBatchSpec:
        """How batches are cut into micro-batches, for training or for a forward-only pass."""
        batching = self.spec.batching
        sequences = batching.ppo_micro_batch_size_per_gpu
        tokens = batching.ppo_max_token_len_per_gpu
        if not training:
            sequences = batching.log_prob_micro_batch_size_per_gpu or sequences
            tokens = batching.log_prob_max_token_len_per_gpu or tokens
        tokens = tokens * self.layout.cp if batching.use_dynamic_bsz else None
        limits = MicroBatchLimits(sequences, tokens)
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return MicroBatchSpec(self.layout.dp, multiple, limits)

    def plan(self, batch: Batch, training: bool) -> MicroBatchPlan:
        """The micro-batches of a pass over all of a batch."""
        return self.micro_batch_spec(training).plan(batch.lengths_B.tolist())

    def predicted_mask_T(self, batch: Batch) -> Tensor:
        """1 on the tokens whose value or log-probability the head gives, float32 ``[T]``."""
        return batch.value_mask_T if self.spec.head == "value" else batch.response_mask_T

    @torch.no_grad()
    def forward(
        self, batch: Batch, plan: MicroBatchPlan, inputs: PassInputs = TOKENS_ONLY
    ) -> Outputs:
        """The head's outputs for the global batch, without gradients.

        Args:
            batch: the global batch, the same on every rank.
            plan: micro-batches for every data-parallel rank.
            inputs: what the pass is given besides tokens.

        Returns:
            Outputs on the batch's token axis, float32 ``[T]`` on the CPU of every rank, zero
            outside responses.
        """
        compute = partial(self.head, batch=batch, inputs=inputs)
        microbatches, parts = self._forward(batch, plan, compute)
        return self.gather_outputs(batch, microbatches, parts, inputs.ref_hidden_T is not None)

    @torch.no_grad()
    def forward_with_states(self, batch: Batch, plan: MicroBatchPlan) -> tuple[Outputs, Tensor]:
        """As :meth:`forward`, and the hidden states that predict each response token.

        Returns:
            The head's outputs; hidden states ``[T, hidden]`` in the parameters' dtype, on the CPU
            of every rank, zero outside responses.
        """

        def outputs_and_states(hidden: Tensor, microbatch: MicroBatch) -> tuple[Outputs, Tensor]:
            outputs = self.head(hidden, microbatch, batch, TOKENS_ONLY)
            return outputs, self.head.predicting_states(hidden, microbatch).cpu()

        microbatches, parts = self._forward(batch, plan, outputs_and_states)
        outputs = self.gather_outputs(batch, microbatches, [part for part, _ in parts], False)
        width = self.config.hidden_size
        hidden_T = torch.zeros(len(batch.tokens_T), width, dtype=self.spec.dtype)
        if self.groups.is_last_stage and self.groups.coordinates.tp == 0:
            for microbatch, (_, hidden_N) in zip(microbatches, parts):
                hidden_T[microbatch.predicted_in(batch)] = hidden_N
        for rows in hidden_T.split(_EXCHANGED_ROWS):
            exchanged = rows.float().to(device.device())
            dist.all_reduce(exchanged)
            rows.copy_(exchanged)
        return outputs, hidden_T

    def gather_outputs(
        self,
        batch: Batch,
        microbatches: Sequence[MicroBatch],
        parts: Sequence[Outputs],
        with_full_kl: bool,
    ) -> Outputs:
        """Outputs of every rank's micro-batches on the batch's token axis, on every rank's CPU."""
        count = num_outputs(self.spec.head, with_full_kl)
        rows_kT = torch.zeros(count, len(batch.tokens_T), device=device.device())
        if self.groups.is_reporting_rank:
            for microbatch, part in zip(microbatches, parts):
                where = microbatch.tokens_in(batch).to(rows_kT.device)
                rows_kT[:, where] = stack_outputs(part)
        dist.all_reduce(rows_kT)
        return unstack_outputs(self.spec.head, rows_kT.cpu())

    def _forward(
        self, batch: Batch, plan: MicroBatchPlan, finish: Callable[[Tensor, MicroBatch], Any]
    ) -> tuple[list[MicroBatch], list[Any]]:
        """This rank's micro-batches, and on the last stage what ``finish`` makes of their hidden
        states; no gradient."""
        microbatches = self.begin_forward(batch, plan)
        with self.groups.active():
            parts = run_pipeline(
                self.stages,
                microbatches,
                run_chunk,
                finish,
                max_tokens=max(len(m.tokens_t) for m in microbatches),
            )
        self.end_forward(batch, plan, microbatches)
        return microbatches, parts

    def begin_forward(self, batch: Batch, plan: MicroBatchPlan) -> list[MicroBatch]:
        """Prepare a forward-only pass; this rank's micro-batches."""
        with self.groups.active():
            for stage in self.stages:
                stage.eval()
            microbatches = self.cut(batch, plan)
            if self.routing:
                self.routing.before_forward(batch, microbatches)
        return microbatches

    def end_forward(
        self, batch: Batch, plan: MicroBatchPlan, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Keep what the routers recorded in a forward-only pass. Collective."""
        if self.routing:
            with self.groups.active():
                self.routing.after_forward(batch, plan, microbatches)

    def forward_backward(self, mini_batch: MiniBatch) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch, from zero.

        Returns:
            The summed statistics, the same on every rank.
        """
        batch, plan = mini_batch.batch, mini_batch.plan
        assert self.optimizer is not None, f"{self.name} is frozen"
        if self.routing and self.routing.needs_record(batch, plan):
            with torch.no_grad():
                self._forward(batch, plan, partial(self.head, batch=batch, inputs=TOKENS_ONLY))
        with self.groups.active():
            for stage in self.stages:
                stage.train()
            self.optimizer.zero_grad()
            microbatches = self.cut(batch, plan)
            if self.routing:
                self.routing.before_update(batch, plan, microbatches)
            parts = run_pipeline(
                self.chunks,
                microbatches,
                run_chunk,
                partial(self.head, batch=batch, inputs=mini_batch.inputs),
                max_tokens=max(len(m.tokens_t) for m in microbatches),
                objective=mini_batch.objective,
            )
        return self.start_statistics(parts).wait()

    def optimizer_step(self) -> StepResult:
        """Apply the accumulated gradient, unless it or its loss is not finite."""
        return step_together([self])[self.name]

    def routing_metrics(self) -> dict[str, float]:
        """Balance of the experts and router replay since the last call; collective."""
        return self.routing.metrics(self.name) if self.routing else {}

    def cut(self, batch: Batch, plan: MicroBatchPlan) -> list[MicroBatch]:
        """This rank's micro-batches of a plan."""
        mine = plan[self.groups.coordinates.dp]
        context = None
        if self.layout.cp > 1:
            context = ContextPlace(self.layout.cp, self.groups.coordinates.cp)
        merge = not self.stages[0].uses_transformer_engine
        mask_T = self.predicted_mask_T(batch)
        return [
            cut(batch, indices, self.token_multiple, device.device(), mask_T, context, merge)
            for indices in mine
        ]

    def message_room(self, microbatch: MicroBatch) -> Tensor:
        """Memory for a micro-batch's hidden states between two stages, or their gradient.

        Returns:
            ``[t, 1, hidden]``, ``[t / tp, 1, hidden]`` under sequence parallelism.
        """
        tokens = len(microbatch.tokens_t) // self.token_multiple
        shape = (tokens, 1, self.config.hidden_size)
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=device.device())

    def start_statistics(
        self, parts: Sequence[tuple[Tensor, dict[str, Tensor]]], leave: bool = False
    ) -> PendingStatistics:
        """Begin to sum loss and statistics over the micro-batches of all ranks.

        Args:
            parts: of this rank's micro-batches.
            leave: whether this rank would leave the update.
        """
        if self._stat_names is None:
            known = all_gather_objects(sorted(parts[0][1]) if parts else None)
            self._stat_names = next(names for names in known if names is not None)
        names = self._stat_names
        totals = torch.zeros(2 + len(names), dtype=torch.float64)
        if self.groups.is_reporting_rank:
            rows = [
                torch.stack([loss.detach().double(), *(stats[n].double() for n in names)])
                for loss, stats in parts
            ]
            for row in torch.stack(rows).cpu():  # one copy for all micro-batches
                totals[1:] += row
        totals[0] = leave
        # on the CPU, so that no rank waits inside a kernel
        work = cast("dist.Work", dist.all_reduce(totals, async_op=True))
        return PendingStatistics(self, names, totals, work)

    def take_step(self, norm: float) -> None:
        """Clip the accumulated gradient, whose norm is ``norm``, and update the weights."""
        assert self.optimizer is not None, f"{self.name} is frozen"
        with self.groups.active():
            self.optimizer.apply(norm)
            if self.routing:
                self.routing.move_expert_biases()
        if self.weights.average is not None:
            self.weights.average.update()


@dataclass
class PendingStatistics:
    """Loss and statistics of a mini-batch on their way.

    Args:
        role: whose.
        names: of the statistics.
        totals: how many ranks would leave the update, the loss, the statistics; float64.
        work: the sum over ranks under way.
        leave: whether any rank would leave the update; known after ``wait``.
    """

    role: Role
    names: list[str]
    totals: Tensor
    work: dist.Work
    leave: bool = False

    def wait(self) -> dict[str, float]:
        """The summed statistics, the same on every rank; sets the role's ``loss``."""
        self.work.wait()
        leaving, self.role.loss, *sums = self.totals.tolist()
        self.leave = leaving > 0
        return dict(zip(self.names, sums, strict=True))


def step_together(roles: Sequence[Role]) -> dict[str, StepResult]:
    """Sum the norms of the accumulated gradients of several roles, and ``take_steps``."""
    norms = {}
    for role in roles:
        assert role.optimizer is not None, f"{role.name} is frozen"
        with role.groups.active():
            norms[role.name] = role.optimizer.start_norm().wait()
    return take_steps(roles, norms)


def take_steps(roles: Sequence[Role], norms: Mapping[str, float]) -> dict[str, StepResult]:
    """Apply the accumulated gradients of several roles: all of them, or none if any gradient, or
    the loss it belongs to, is not finite.

    Args:
        roles: whose gradients are ready.
        norms: of the gradients, by role name.

    Returns:
        By role name.
    """
    numbers = [*norms.values(), *(role.loss for role in roles)]
    finite = all(math.isfinite(number) for number in numbers)
    for role in roles if finite else ():
        role.take_step(norms[role.name])
    return {role.name: StepResult(role.loss, norms[role.name], finite) for role in roles}


def run_chunk(chunk: torch.nn.Module, microbatch: MicroBatch) -> Tensor:
    """The output of a chunk, in DDP or not."""
    stage = cast("Stage", chunk.module if hasattr(chunk, "ddp_config") else chunk)
    return stage.forward_packed(microbatch.tokens_t, microbatch.packing)
