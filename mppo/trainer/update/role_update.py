"""The update of one role: its mini-batches, their objectives, statistics and operation counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from mppo.batch.batch import Batch
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.mini_batch import TOKENS_ONLY, MiniBatch, Objective, PassInputs
from mppo.models.role import Role
from mppo.models.streamed_role import forward_backward
from mppo.parallel import device
from mppo.planning.flops import ModelFlops, update_flops
from mppo.trainer.metrics import update_metrics
from mppo.trainer.pretraining_mix import Documents, PretrainingMix


@dataclass(frozen=True)
class PlannedMiniBatch:
    """A mini-batch cut into micro-batches, before its targets are computed; ``documents`` are those
    of the pretraining mix."""

    sequences: tuple[int, ...]
    plan: MicroBatchPlan
    documents: Documents | None = None

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per data-parallel rank, including those of the documents."""
        return len(self.plan[0]) + (0 if self.documents is None else len(self.documents.plan[0]))


@dataclass
class RoleUpdate:
    """The update of one role in one iteration. ``objective_of`` makes the objective of a mini-batch
    from its sequence indices and its plan; collective. So far it has taken ``seconds``, ``flops``
    over all ranks, and ``tokens`` over all data-parallel ranks."""

    role: Role
    mini_batches: list[list[int]]
    objective_of: Callable[[tuple[int, ...], MicroBatchPlan], Objective]
    model_flops: ModelFlops
    inputs: PassInputs = TOKENS_ONLY
    text: PretrainingMix | None = None
    peak_tflops: float | None = None
    epochs: int = 1
    learning_rate: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    tokens: int = 0
    stats: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def planned(self, batch: Batch, sequences: Sequence[int]) -> PlannedMiniBatch:
        """Cut sequences into micro-batches and draw the documents of their mini-batch."""
        spec = self.role.micro_batch_spec(training=True)
        plan = spec.plan(batch.lengths_B.tolist(), sequences)
        documents = None if self.text is None else self.text.draw(spec)
        return PlannedMiniBatch(tuple(sequences), plan, documents)

    def mini_batch(self, batch: Batch, planned: PlannedMiniBatch) -> MiniBatch:
        """Bring a mini-batch and its targets to their ranks; count its operations. Collective."""
        plan = planned.plan
        share, inputs = self.role.fetch(batch, plan, self.inputs)
        objective = self.objective_of(planned.sequences, plan)
        if self.text is not None and planned.documents is not None:
            inputs = replace(inputs, text_from=batch.num_sequences)
            share, plan, objective = self.text.join(share, plan, planned.documents, objective)
        self.flops += update_flops(self.model_flops, share, plan, self.role.predicted_B(share))
        chosen = [index for rank in plan for indices in rank for index in indices]
        self.tokens += int(share.lengths_B[chosen].sum())
        return MiniBatch(share, plan, objective, inputs)

    def run_once(self, batch: Batch, sequences: tuple[int, ...]) -> None:
        """Compute the gradient of one mini-batch. Collective."""
        mini_batch = self.mini_batch(batch, self.planned(batch, sequences))
        self.stats.append(forward_backward(self.role, mini_batch))

    @contextmanager
    def timing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        device.synchronize()
        self.seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        name = self.role.name
        return update_metrics(self.stats, self.epochs) | {
            f"{name}/grad_norm": sum(self.norms) / len(self.norms),
            f"{name}/lr": self.learning_rate,
            **self.role.routing_metrics(),
            **self._work_metrics(),
        }

    def _work_metrics(self) -> dict[str, float]:
        """TFLOP/s per rank over this update, and their share of the peak (MFU) if it is known."""
        name, ranks = self.role.name, torch.distributed.get_world_size()
        rate = self.flops / self.seconds / ranks / 1e12
        metrics = {f"perf/tflops_per_rank/{name}": rate}
        if self.peak_tflops is not None:
            metrics[f"perf/mfu/{name}"] = rate / self.peak_tflops
        return metrics
