"""A role: a model in its own layout, measured and (where it learns) updated."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mppo.algos.packing import sequence_token_indices
from mppo.batch import Batch
from mppo.config.schema import BatchingConfig, MegatronConfig, OptimConfig
from mppo.models.configuration import transformer_config
from mppo.models.context import ContextPlace
from mppo.models.families import family_config
from mppo.models.head import Vocabulary, chunked_logprobs, gather_hidden, gather_values
from mppo.models.microbatch import MicroBatch, cut
from mppo.models.moe import freeze_routers
from mppo.models.optimizer import RoleOptimizer, StepResult, wrap_in_ddp
from mppo.models.routing import Replay, RoleRouting
from mppo.models.stage import Head, Stage, build_stages
from mppo.parallel import device
from mppo.parallel.balance import MicroBatchLimits, Plan
from mppo.parallel.executor import run_pipeline
from mppo.parallel.groups import LayoutGroups
from mppo.parallel.schedule import RoleShape
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.load import load_hf_weights
from mppo.weights.save import save_hf
from mppo.weights.stream import stream_hf_weights

Outputs = tuple[Tensor, ...]
"""What a head gives per token of a micro-batch, float32 ``[T]`` each: (log-probs, entropies) for a
policy, (values,) for a value model."""

Objective = Callable[[Outputs, tuple[int, ...]], tuple[Tensor, dict[str, Tensor]]]
"""From outputs and the micro-batch's sequence indices to (summed loss, summed statistics)."""


@dataclass(frozen=True)
class RoleSpec:
    """How to build a role.

    Args:
        name: "actor", "critic", "ref" or "reward".
        head: what the model ends in.
        folder: Hugging Face folder with the initial weights.
        dtype: parameters' dtype.
        megatron: layout and recomputation.
        batching: micro-batch limits and head chunk.
        temperature: log-probabilities are of softmax(logits / temperature).
        optim: None for a frozen role.
        total_steps: PPO steps of the run.
        router_replay: whose choice of experts the update takes (``mppo.models.routing``).
    """

    name: str
    head: Head
    folder: Path
    dtype: torch.dtype
    megatron: MegatronConfig
    batching: BatchingConfig
    temperature: float = 1.0
    optim: OptimConfig | None = None
    total_steps: int = 1
    router_replay: Replay = "off"


class Role:
    """A Megatron model on this rank's part of a layout.

    Args:
        spec: how to build it.
        hf_config: transformers config of ``spec.folder``.
        groups: the layout's process groups.
    """

    def __init__(self, spec: RoleSpec, hf_config, groups: LayoutGroups) -> None:
        self.spec = spec
        self.groups = groups
        self.layout = groups.layout
        self.hf_config = hf_config
        device.prepare_dtype(spec.dtype)
        family = family_config(hf_config)
        self._vocab_size = family.gpt_kwargs["vocab_size"]
        with groups.active():
            self.config = transformer_config(family, spec.megatron, self.layout, spec.dtype)
            padded_vocab = padded_vocab_size(self._vocab_size, self.layout.tp)
            self.stages: list[Stage] = build_stages(
                family, self.config, self.layout, padded_vocab, groups.coordinates.pp, spec.head
            )
            load_hf_weights(spec.folder, self.stages, hf_config, self.layout, groups.coordinates)
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
        self._stat_names: list[str] | None = None

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

    @torch.no_grad()
    def measure(self, batch: Batch, plan: Plan) -> Outputs:
        """Forward pass over the whole batch.

        Args:
            batch: the global batch, the same on every rank.
            plan: micro-batches for every data-parallel rank.

        Returns:
            The head's outputs for the whole batch, float32 ``[T]`` on the CPU of every rank, zero
            outside responses.
        """
        microbatches, parts = self._forward(batch, plan)
        count = 2 if self.spec.head == "policy" else 1
        outputs = torch.zeros(count, len(batch.tokens_T), device=device.device())
        if self.groups.speaks:
            for microbatch, part in zip(microbatches, parts):
                where = _token_indices(batch, microbatch.indices).to(outputs.device)
                outputs[:, where] = torch.stack(part)
        dist.all_reduce(outputs)
        return tuple(outputs.cpu())

    def _forward(self, batch: Batch, plan: Plan) -> tuple[list[MicroBatch], list[Outputs]]:
        """This rank's micro-batches, and on the last stage their outputs; no gradient."""
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
                lambda hidden, microbatch: self._head(hidden, microbatch),
                backward=False,
                max_tokens=max(len(m.tokens_t) for m in microbatches),
            )
            if self.routing:
                self.routing.after_measure(batch, plan, microbatches)
        return microbatches, parts

    def forward_backward(self, batch: Batch, plan: Plan, objective: Objective) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch, from zero.

        Args:
            batch: the global batch.
            plan: the mini-batch's micro-batches for every data-parallel rank.
            objective: loss and statistics of a micro-batch; both add up over the mini-batch.

        Returns:
            The summed statistics, the same on every rank.
        """
        assert self.optimizer is not None, f"{self.name} is frozen"
        if self.routing and self.routing.needs_record(batch, plan):
            with torch.no_grad():
                self._forward(batch, plan)
        with self.groups.active():
            for stage in self.stages:
                stage.train()
            self.optimizer.zero_grad()
            microbatches = self._cut(batch, plan)
            if self.routing:
                self.routing.before_update(batch, plan, microbatches)
            parts = run_pipeline(
                self._chunks,
                microbatches,
                _run_chunk,
                lambda hidden, m: objective(self._head(hidden, m), m.indices),
                backward=True,
                max_tokens=max(len(m.tokens_t) for m in microbatches),
            )
        return self._sum_statistics(parts)

    def optimizer_step(self) -> StepResult:
        """Apply the accumulated gradient, unless it is not finite."""
        return step_together([self])[self.name]

    def routing_metrics(self) -> dict[str, float]:
        """Balance of the experts and router replay since the last call; collective."""
        return self.routing.metrics(self.name) if self.routing else {}

    def hf_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The current weights under Hugging Face names, whole, bucket by bucket; collective."""
        with self.groups.active():
            yield from stream_hf_weights(
                self.stages,
                self.hf_config,
                self.layout,
                self.groups.coordinates,
                self.groups,
                bucket_bytes,
            )

    def save(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder (config and tokenizer copied from
        ``spec.folder``); an older one in its place is replaced. Collective."""
        if dist.get_rank() == 0 and folder.exists():
            shutil.rmtree(folder)
        dist.barrier()
        with self.groups.active():
            save_hf(
                folder,
                self.stages,
                self.hf_config,
                self.layout,
                self.groups.coordinates,
                self.groups,
                source=self.spec.folder,
            )

    def _cut(self, batch: Batch, plan: Plan) -> list[MicroBatch]:
        mine = plan[self.groups.coordinates.dp]
        context = None
        if self.layout.cp > 1:
            context = ContextPlace(self.layout.cp, self.groups.coordinates.cp)
        merge = not self.stages[0].uses_transformer_engine
        return [
            cut(batch, indices, self.token_multiple, device.device(), context, merge)
            for indices in mine
        ]

    def _head(self, hidden: Tensor, microbatch: MicroBatch) -> Outputs:
        stage = self.stages[-1]
        if self.spec.head == "value":
            values = stage.value_head(hidden[:, 0])
            values = gather_values(values, self.config.sequence_parallel)
            return self._whole((values[microbatch.source_N],), microbatch)
        hidden = gather_hidden(hidden, self.config.sequence_parallel)
        weight = stage.output_weight()
        vocabulary = Vocabulary(
            start=self.groups.coordinates.tp * weight.shape[0],
            size=self._vocab_size,
            group=self.groups.tp if self.layout.tp > 1 else None,
            temperature=self.spec.temperature,
            softcap=stage.final_logit_softcap,
            chunk=self.spec.batching.head_chunk_tokens,
        )
        chosen = hidden.index_select(0, microbatch.source_N)
        outputs = chunked_logprobs(chosen, weight, microbatch.target_N, vocabulary)
        return self._whole(outputs, microbatch)

    def _whole(self, outputs_N: Outputs, microbatch: MicroBatch) -> Outputs:
        """Spread over the ``T`` tokens of the micro-batch, and over the context-parallel ranks.

        Every rank of the group then computes the whole loss; its gradient reaches only the
        outputs computed here, so gradients add up over the group.
        """
        outputs_T = torch.stack([_spread(x, microbatch) for x in outputs_N])
        if self.layout.cp > 1 and microbatch.num_tokens:
            outputs_T = reduce_from_tensor_model_parallel_region(outputs_T, self.groups.cp)
        return tuple(outputs_T)

    def _sum_statistics(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        if self._stat_names is None:
            known = [None] * dist.get_world_size()
            dist.all_gather_object(known, sorted(parts[0]) if parts else None)
            self._stat_names = next(names for names in known if names is not None)
        totals = torch.zeros(len(self._stat_names), dtype=torch.float64)
        if self.groups.speaks:
            for part in parts:
                totals += torch.tensor([float(part[name]) for name in self._stat_names])
        totals = totals.to(device.device())
        dist.all_reduce(totals)
        return dict(zip(self._stat_names, totals.tolist()))


def step_together(roles: Sequence[Role]) -> dict[str, StepResult]:
    """Apply the accumulated gradients of several roles: all of them, or none if any is not finite.

    Returns:
        By role name; the norms are the same on every rank, and so is the decision.
    """
    norms = {}
    for role in roles:
        assert role.optimizer is not None, f"{role.name} is frozen"
        with role.groups.active():
            norms[role.name] = role.optimizer.gradient_norm()
    finite = all(math.isfinite(norm) for norm in norms.values())
    for role in roles if finite else ():
        with role.groups.active():
            role.optimizer.apply(norms[role.name])
    return {name: StepResult(norm, finite) for name, norm in norms.items()}


def _run_chunk(chunk: torch.nn.Module, microbatch: MicroBatch) -> Tensor:
    stage = chunk.module if hasattr(chunk, "ddp_config") else chunk
    return stage.forward_packed(microbatch.tokens_t, microbatch.packing)


def _spread(x_N: Tensor, microbatch: MicroBatch) -> Tensor:
    """Response-token quantities on the micro-batch's token axis, zero elsewhere: ``[T]``."""
    x_T = torch.zeros(microbatch.num_tokens, dtype=x_N.dtype, device=x_N.device)
    if len(microbatch.index_N) == 0:
        return x_T + x_N.sum()
    return x_T.index_copy(0, microbatch.index_N, x_N)


def _token_indices(batch: Batch, indices: Sequence[int]) -> Tensor:
    return sequence_token_indices(batch.cu_seqlens, indices)
