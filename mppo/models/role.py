"""A role: a model in its own layout, measured and (where it learns) updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mppo.batch import Batch
from mppo.models.average import MovingAverage
from mppo.models.configuration import transformer_config
from mppo.models.context import ContextPlace
from mppo.models.families import family_config
from mppo.models.flops import model_flops
from mppo.models.full_kl import Projection, chunked_full_kl
from mppo.models.head import Vocabulary, chunked_logprobs, gather_hidden, gather_values
from mppo.models.microbatch import MicroBatch, cut
from mppo.models.moe import freeze_routers
from mppo.models.optimizer import RoleOptimizer, StepResult, wrap_in_ddp
from mppo.models.role_spec import PLAIN, Extras, Objective, Outputs, RoleSpec
from mppo.models.routing import RoleRouting
from mppo.models.stage import Stage, build_stages
from mppo.parallel import device
from mppo.parallel.balance import MicroBatchLimits, Plan
from mppo.parallel.executor import run_pipeline
from mppo.parallel.groups import LayoutGroups
from mppo.parallel.schedule import RoleShape
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.checkpoint import load_weights
from mppo.weights.model_folder import companion_folder
from mppo.weights.save import save_hf
from mppo.weights.slices import SliceSource
from mppo.weights.stream import WeightStream

_PROJECTIONS = ("lm_head.weight", "model.embed_tokens.weight")
"""Hugging Face names of the vocabulary projection; the second where it is tied."""

_EXCHANGED_ROWS = 8192
"""Tokens whose hidden states are on the device at one time while ranks exchange them."""


class Role:
    """A Megatron model on this rank's part of a layout.

    Args:
        spec: how to build it.
        hf_config: transformers config of ``spec.folder``.
        groups: the layout's process groups.

    Attributes:
        flops: operations of its passes.
        loss: of the mini-batch whose gradient is accumulated, the same on every rank.
        fresh: parameters that ``spec.folder`` does not have: a value head of a plain model.
        slices: the current weights as pieces for the ranks of an engine.
    """

    def __init__(self, spec: RoleSpec, hf_config, groups: LayoutGroups) -> None:
        self.spec, self.groups, self.layout = spec, groups, groups.layout
        self.hf_config = hf_config
        device.prepare_dtype(spec.dtype)
        family = family_config(hf_config)
        self.flops = model_flops(hf_config, spec.head)
        self._vocab_size = family.gpt_kwargs["vocab_size"]
        with groups.active():
            self.config = transformer_config(
                family, spec.megatron, self.layout, spec.dtype, trained=spec.optim is not None
            )
            padded_vocab = padded_vocab_size(self._vocab_size, self.layout.tp)
            self.stages: list[Stage] = build_stages(
                family, self.config, self.layout, padded_vocab, groups.coordinates.pp, spec.head
            )
            self.fresh = load_weights(
                spec.folder, self.stages, hf_config, self.layout, groups.coordinates
            )
            if spec.megatron.freeze_moe_router:
                for stage in self.stages:
                    freeze_routers(stage)
            self.routing: RoleRouting | None = None
            if self.config.num_moe_experts:
                self.routing = RoleRouting(
                    self.stages, spec.megatron, spec.router_replay, groups, self.config
                )
            self._chunks: list[torch.nn.Module] = list(self.stages)
            self.optimizer: RoleOptimizer | None = None
            if spec.optim is not None:
                self._chunks = wrap_in_ddp(self.stages, spec.megatron)
                self.optimizer = RoleOptimizer(
                    self._chunks, spec.optim, spec.megatron, spec.dtype, spec.total_steps
                )
            else:
                for stage in self.stages:
                    stage.requires_grad_(False)
        self.average: MovingAverage | None = None
        if spec.ema_decay is not None:
            self.average = MovingAverage(self.stages, spec.ema_decay)
        self._reference: Projection | None = None
        self.loss = 0.0
        self._stat_names: list[str] | None = None
        self.slices = SliceSource(self.stages, hf_config, self.layout)

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.name

    @property
    def token_multiple(self) -> int:
        """A rank's token counts of micro-batches are multiples of this."""
        return self.layout.tp if self.config.sequence_parallel else 1

    def shape(self, measuring: bool) -> RoleShape:
        """What the schedule needs to know, for a forward-only pass or for training."""
        batching = self.spec.batching
        sequences = batching.ppo_micro_batch_size_per_gpu
        tokens = batching.ppo_max_token_len_per_gpu
        if measuring:
            sequences = batching.log_prob_micro_batch_size_per_gpu or sequences
            tokens = batching.log_prob_max_token_len_per_gpu or tokens
        tokens = tokens * self.layout.cp if batching.use_dynamic_bsz else None
        limits = MicroBatchLimits(sequences, tokens)
        multiple = self.layout.pp if self.layout.vpp > 1 else 1
        return RoleShape(self.name, self.layout.dp, multiple, limits)

    def predicted_mask_T(self, batch: Batch) -> Tensor:
        """1 on the tokens whose value or log-probability the head gives, float32 ``[T]``."""
        return batch.value_mask_T if self.spec.head == "value" else batch.response_mask_T

    @torch.no_grad()
    def measure(self, batch: Batch, plan: Plan, extras: Extras = PLAIN) -> Outputs:
        """Forward pass over the whole batch.

        Args:
            batch: the global batch, the same on every rank.
            plan: micro-batches for every data-parallel rank.
            extras: what a policy compares with.

        Returns:
            The head's outputs for the whole batch, float32 ``[T]`` on the CPU of every rank, zero
            outside responses.
        """
        microbatches, parts = self._forward(batch, plan, partial(self._head, batch, extras))
        return self._gather_outputs(batch, microbatches, parts, extras.ref_hidden_T is not None)

    @torch.no_grad()
    def measure_states(self, batch: Batch, plan: Plan) -> tuple[Outputs, Tensor]:
        """As :meth:`measure`, and the hidden states that predict each response token.

        Returns:
            The head's outputs; hidden states ``[T, hidden]`` in the parameters' dtype, on the CPU
            of every rank, zero outside responses.
        """

        def both(hidden: Tensor, microbatch: MicroBatch) -> tuple[Outputs, Tensor]:
            outputs = self._head(batch, PLAIN, hidden, microbatch)
            return outputs, self._predicting(hidden, microbatch).cpu()

        microbatches, parts = self._forward(batch, plan, both)
        outputs = self._gather_outputs(batch, microbatches, [part for part, _ in parts], False)
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

    def compare_with(self, reference: Role, bucket_bytes: int) -> None:
        """Keep this rank's rows of a frozen policy's projection, for the KL over the vocabulary.

        Collective. ``reference`` may have another layout.

        Raises:
            ValueError: the two have different vocabularies.
        """
        if reference._vocab_size != self._vocab_size:
            raise ValueError(
                f"ref.path: its vocabulary has {reference._vocab_size} tokens, the actor's "
                f"{self._vocab_size}; kl type full compares them token by token: choose k3, or "
                "another reference"
            )
        rows = padded_vocab_size(self._vocab_size, self.layout.tp) // self.layout.tp
        start = self.groups.coordinates.tp * rows
        found: dict[str, Tensor] = {}
        for bucket in reference.hf_weights(bucket_bytes):
            for name, tensor in bucket:
                if self.groups.is_last_stage and name in _PROJECTIONS:
                    found[name] = torch.zeros(rows, tensor.shape[1], dtype=tensor.dtype)
                    mine = tensor[start : start + rows]
                    found[name][: len(mine)] = mine
        for name in _PROJECTIONS:
            if name in found and self._reference is None:
                vocabulary = self._vocabulary(rows, reference.final_logit_softcap)
                self._reference = Projection(found[name].to(device.device()), vocabulary)

    def _gather_outputs(
        self,
        batch: Batch,
        microbatches: Sequence[MicroBatch],
        parts: Sequence[Outputs],
        compared: bool,
    ) -> Outputs:
        """Outputs of every rank's micro-batches on the batch's token axis, on every rank's CPU."""
        count = 2 + compared if self.spec.head == "policy" else 1
        outputs = torch.zeros(count, len(batch.tokens_T), device=device.device())
        if self.groups.speaks:
            for microbatch, part in zip(microbatches, parts):
                where = microbatch.tokens_in(batch).to(outputs.device)
                outputs[:, where] = torch.stack(part)
        dist.all_reduce(outputs)
        return tuple(outputs.cpu())

    def _forward(
        self, batch: Batch, plan: Plan, finish: Callable[[Tensor, MicroBatch], Any]
    ) -> tuple[list[MicroBatch], list[Any]]:
        """This rank's micro-batches, and on the last stage what ``finish`` makes of their hidden
        states; no gradient."""
        with self.groups.active():
            for stage in self.stages:
                stage.eval()
            microbatches = self._cut(batch, plan)
            if self.routing:
                self.routing.before_measure(batch, microbatches)
            parts = run_pipeline(
                self.stages,
                microbatches,
                _run_chunk,
                finish,
                backward=False,
                max_tokens=max(len(m.tokens_t) for m in microbatches),
            )
            if self.routing:
                self.routing.after_measure(batch, plan, microbatches)
        return microbatches, parts

    def forward_backward(
        self, batch: Batch, plan: Plan, objective: Objective, extras: Extras = PLAIN
    ) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch, from zero.

        Args:
            batch: the global batch.
            plan: the mini-batch's micro-batches for every data-parallel rank.
            objective: loss and statistics of a micro-batch; both add up over the mini-batch.
            extras: what a policy compares with, and which sequences are plain text.

        Returns:
            The summed statistics, the same on every rank.
        """
        assert self.optimizer is not None, f"{self.name} is frozen"
        if self.routing and self.routing.needs_record(batch, plan):
            with torch.no_grad():
                self._forward(batch, plan, partial(self._head, batch, PLAIN))
        with self.groups.active():
            for stage in self.stages:
                stage.train()
            self.optimizer.zero_grad()
            microbatches = self._cut(batch, plan)
            if self.routing:
                self.routing.before_update(batch, plan, microbatches)

            def finish(hidden: Tensor, microbatch: MicroBatch):
                outputs = self._head(batch, extras, hidden, microbatch)
                loss, stats = objective(outputs, microbatch.indices)
                return loss, (loss.detach(), stats)

            parts = run_pipeline(
                self._chunks,
                microbatches,
                _run_chunk,
                finish,
                backward=True,
                max_tokens=max(len(m.tokens_t) for m in microbatches),
            )
        self.loss, stats = self._sum_statistics(parts)
        return stats

    def optimizer_step(self) -> StepResult:
        """Apply the accumulated gradient, unless it or its loss is not finite."""
        return step_together([self])[self.name]

    def routing_metrics(self) -> dict[str, float]:
        """Balance of the experts and router replay since the last call; collective."""
        return self.routing.metrics(self.name) if self.routing else {}

    def hf_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The current weights under Hugging Face names, whole, bucket by bucket; collective."""
        with self.groups.active():
            yield from WeightStream(
                self.stages,
                self.hf_config,
                self.layout,
                self.groups.coordinates,
                self.groups,
                bucket_bytes,
            )

    def save(self, folder: Path) -> Path | None:
        """Write the current weights as a Hugging Face folder (config and tokenizer copied from
        those of ``spec.folder``). Collective.

        Returns:
            On the first rank, where a folder that mppo did not write is now (``save_hf``).
        """
        with self.groups.active():
            return save_hf(
                folder,
                self.stages,
                self.hf_config,
                self.layout,
                self.groups.coordinates,
                self.groups,
                source=companion_folder(self.spec.folder),
            )

    def save_average(self, folder: Path) -> Path | None:
        """As :meth:`save`, of the moving average."""
        assert self.average is not None, f"{self.name} keeps no moving average"
        with self.average.in_place():
            return self.save(folder)

    def _cut(self, batch: Batch, plan: Plan) -> list[MicroBatch]:
        mine = plan[self.groups.coordinates.dp]
        context = None
        if self.layout.cp > 1:
            context = ContextPlace(self.layout.cp, self.groups.coordinates.cp)
        merge = not self.stages[0].uses_transformer_engine
        mask_T = self.predicted_mask_T(batch)
        return [
            cut(batch, indices, self.token_multiple, device.device(), context, merge, mask_T)
            for indices in mine
        ]

    def _head(
        self, batch: Batch, extras: Extras, hidden: Tensor, microbatch: MicroBatch
    ) -> Outputs:
        stage = self.stages[-1]
        if self.spec.head == "value":
            values = stage.value_head(hidden[:, 0])
            values = gather_values(values, self.config.sequence_parallel)
            return self._whole((self._read(values, microbatch),), microbatch)
        weight, is_text = stage.output_weight(), extras.is_text(microbatch)
        vocabulary = self._vocabulary(len(weight), stage.final_logit_softcap)
        if is_text:
            vocabulary = replace(vocabulary, temperature=1.0)
        chosen = self._predicting(hidden, microbatch)
        outputs = chunked_logprobs(chosen, weight, microbatch.target_N, vocabulary)
        if extras.ref_hidden_T is not None and is_text:
            outputs = (*outputs, torch.zeros_like(outputs[0]))
        elif extras.ref_hidden_T is not None:
            assert self._reference is not None, "compare_with comes first"
            theirs = extras.ref_hidden_T[microbatch.predicted_in(batch)].to(chosen.device)
            kl = chunked_full_kl(chosen, weight, theirs, vocabulary, self._reference)
            outputs = (*outputs, kl)
        return self._whole(outputs, microbatch)

    @property
    def final_logit_softcap(self) -> float | None:
        """The bound c of the logits ``c tanh(x / c)``, or None."""
        return self.stages[-1].final_logit_softcap

    def _vocabulary(self, rows: int, softcap: float | None) -> Vocabulary:
        """How the projection is split over this layout."""
        return Vocabulary(
            start=self.groups.coordinates.tp * rows,
            size=self._vocab_size,
            group=self.groups.tp if self.layout.tp > 1 else None,
            temperature=self.spec.temperature,
            softcap=softcap,
            chunk=self.spec.batching.head_chunk_tokens,
        )

    def _predicting(self, hidden: Tensor, microbatch: MicroBatch) -> Tensor:
        """Hidden states that predict a response token ``[N, hidden]``, of the last stage's."""
        hidden = gather_hidden(hidden, self.config.sequence_parallel)
        return self._read(hidden, microbatch)

    def _read(self, outputs: Tensor, microbatch: MicroBatch) -> Tensor:
        """Rows that predict a response token ``[N, ...]``, of the last stage's whole outputs."""
        if self.stages[-1].ends_where_read:
            return outputs
        return outputs.index_select(0, microbatch.packing.read)

    def _whole(self, outputs_N: Outputs, microbatch: MicroBatch) -> Outputs:
        """Spread over the ``T`` tokens of the micro-batch, and over the context-parallel ranks.

        Every rank of the group then computes the whole loss; its gradient reaches only the
        outputs computed here, so gradients add up over the group.
        """
        outputs_T = torch.stack([microbatch.spread(x_N) for x_N in outputs_N])
        if self.layout.cp > 1 and microbatch.num_tokens:
            outputs_T = reduce_from_tensor_model_parallel_region(outputs_T, self.groups.cp)
        return tuple(outputs_T)

    def _sum_statistics(
        self, parts: Sequence[tuple[Tensor, dict[str, Tensor]]]
    ) -> tuple[float, dict[str, float]]:
        """Loss and statistics over the micro-batches of all ranks."""
        if self._stat_names is None:
            known = [None] * dist.get_world_size()
            dist.all_gather_object(known, sorted(parts[0][1]) if parts else None)
            self._stat_names = next(names for names in known if names is not None)
        totals = torch.zeros(1 + len(self._stat_names), dtype=torch.float64)
        if self.groups.speaks:
            for loss, stats in parts:
                totals += torch.tensor([float(loss), *(float(stats[n]) for n in self._stat_names)])
        totals = totals.to(device.device())
        dist.all_reduce(totals)
        loss, *sums = totals.tolist()
        return loss, dict(zip(self._stat_names, sums))


def step_together(roles: Sequence[Role]) -> dict[str, StepResult]:
    """Apply the accumulated gradients of several roles: all of them, or none if any gradient, or
    the loss it belongs to, is not finite.

    Returns:
        By role name.
    """
    norms = {}
    for role in roles:
        assert role.optimizer is not None, f"{role.name} is frozen"
        with role.groups.active():
            norms[role.name] = role.optimizer.gradient_norm()
    numbers = [*norms.values(), *(role.loss for role in roles)]
    finite = all(math.isfinite(number) for number in numbers)
    for role in roles if finite else ():
        with role.groups.active():
            role.optimizer.apply(norms[role.name])
            if role.routing:
                role.routing.move_expert_biases()
        if role.average is not None:
            role.average.update()
    return {role.name: StepResult(role.loss, norms[role.name], finite) for role in roles}


def _run_chunk(chunk: torch.nn.Module, microbatch: MicroBatch) -> Tensor:
    stage = chunk.module if hasattr(chunk, "ddp_config") else chunk
    return stage.forward_packed(microbatch.tokens_t, microbatch.packing)
