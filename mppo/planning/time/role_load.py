"""The passes of one role in a step, and their seconds by pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from mppo.batch.microbatches import MicroBatchLimits, plan_microbatches
from mppo.parallel.layout import Layout
from mppo.planning.flops import ModelFlops
from mppo.planning.time.collective_time import Group, collective_seconds, message_seconds
from mppo.planning.time.cost import Cost
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.layer import BYTES, DecoderLayer, gemms, streamed
from mppo.planning.time.lengths import quantiles
from mppo.recipe.model_shape import ModelShape

_FLOAT = 4
TRAINER = 1.36
"""How much longer the passes of a trainer take than their kernels do one by one: fitted on some of
the published steps (benchmarks/predicted_time.py)."""


@dataclass(frozen=True)
class AgentTurns:
    """How an agent and the policy take turns in an episode.

    Args:
        seconds: what the agent needs after each turn of the policy.
        tokens: what it adds after each turn but the last.
    """

    count: float = 1.0
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def inserted(self) -> float:
        return self.tokens * (self.count - 1)


ONE_TURN = AgentTurns()


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step.

    Args:
        prompt, response: mean tokens; an agent's belong to the response.
        longest: greatest number of tokens of a response.
        known: ascending lengths of a run's responses; empty: only mean and maximum are known.
        cached: the engine computes a beginning that sequences share once.
    """

    count: int
    prompt: float
    response: float
    longest: int
    samples: int = 1
    known: tuple[int, ...] = ()
    turns: AgentTurns = ONE_TURN
    cached: bool = True

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        return self.count * self.length

    def responses(self, count: int) -> list[int]:
        if not self.known:
            return quantiles(self.response, self.longest, count)
        return [self.known[int((i + 0.5) * len(self.known) / count)] for i in range(count)]

    def sample(self, count: int) -> list[int]:
        """Tokens of ``count`` of them."""
        prompt = round(self.prompt)
        return [prompt + tokens for tokens in self.responses(count)]


@dataclass(frozen=True)
class RoleLoad:
    """What a role computes in a step.

    Args:
        active: experts that process a token.
        layers: decoder layers of every pipeline stage.
        parameters: parameters of one rank, by pipeline stage.
        mini_batches: optimizer steps; 0: frozen.
        epochs: how often the update passes over the sequences.
        training: size limit of a micro-batch in training, over all context-parallel ranks.
        measuring: the same in forward-only passes.
        cpu_share: share of the optimizer that the CPU updates.
        lean_head: as mppo's, the head computes its logits again in the backward pass, and the last
            layer's feed-forward has only response tokens where nothing prevents it.
    """

    name: str
    shape: ModelShape
    active: int
    flops: ModelFlops
    layout: Layout
    layers: Sequence[Sequence[int]]
    parameters: Sequence[int]
    policy: bool
    mini_batches: int
    epochs: int
    training: MicroBatchLimits
    measuring: MicroBatchLimits
    model_parameters: int
    recomputes: bool = False
    cpu_share: float = 0.0
    lean_head: bool = True


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of one rank in a pass: their number, and their mean tokens over all
    context-parallel ranks."""

    count: int
    tokens: float

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(
        sequences: StepSequences, share: int, limits: MicroBatchLimits, multiple: int = 1
    ) -> MicroBatches:
        """Cut a rank's ``share`` of the sequences as a run does, into a multiple of
        ``multiple``."""
        lengths = sequences.sample(share)
        (plan,) = plan_microbatches(lengths, range(len(lengths)), 1, limits, multiple)
        return MicroBatches(len(plan), sum(lengths) / len(plan))


class RolePasses:
    """Seconds of a role's passes."""

    def __init__(self, kernels: Kernels, load: RoleLoad, sequences: StepSequences) -> None:
        self.load, self._kernels, self._sequences = load, kernels, sequences
        self.beside = kernels.system.beside
        layout = load.layout
        multiple = layout.pp if layout.vpp > 1 else 1
        own = ceil(sequences.count / layout.dp)
        self.measuring = MicroBatches.of(sequences, own, load.measuring, multiple)
        share = sequences.count * load.epochs / max(1, load.mini_batches)
        own = ceil(share / layout.dp)
        self.training = MicroBatches.of(sequences, own, load.training, multiple)

    @cached_property
    def forward(self) -> list[Cost]:
        """A forward-only pass of a micro-batch, by stage."""
        return [self._forward(stage, self.measuring) for stage in self._stages]

    @cached_property
    def training_forward(self) -> list[Cost]:
        """A forward pass of a micro-batch in training, by stage."""
        return [self._forward(stage, self.training) for stage in self._stages]

    @cached_property
    def training_backward(self) -> list[Cost]:
        """A backward pass of a micro-batch, by stage, recomputation included."""
        return [self._backward(stage) for stage in self._stages]

    def measured(self, fills: bool) -> Cost:
        """A forward-only pass over all sequences, on the slowest stage's rank; it ``fills`` the
        pipeline, or follows another pass through it."""
        slowest = max(self.forward, key=lambda cost: cost.seconds)
        first = sum(self.forward, Cost()) if fills else slowest
        return first + slowest * (self.measuring.count - 1)

    def operations(self) -> tuple[float, float]:
        """Operations of a forward-only pass and of an update, over all ranks."""
        load, length = self.load, round(self._sequences.length)
        outputs = round(self._sequences.response) if load.policy else length
        one = load.flops.forward([length], outputs) * self._sequences.count
        return one, 3 * one * load.epochs

    def reduction(self, stage: int) -> float:
        """Seconds of a mini-batch's exchange of gradients and weights between data-parallel ranks;
        gradients are float32."""
        layout = self.load.layout
        group = Group(layout.dp * layout.cp, layout.tp)
        count = self.load.parameters[stage]
        return collective_seconds(
            self._kernels, "reduce_scatter", count * _FLOAT, group
        ) + collective_seconds(self._kernels, "all_gather", count * BYTES, group)

    def optimizer(self, stage: int) -> Cost:
        """An optimizer step of one rank's share: master weights and two moments are read and
        written, gradients read, weights written; the host waits for the norm of the gradients."""
        layout = self.load.layout
        share = self.load.parameters[stage] / (layout.dp * layout.cp)
        on_gpu = streamed(
            self._kernels, share * (1 - self.load.cpu_share) * (7 * _FLOAT + BYTES), 4
        )
        moved = share * self.load.cpu_share * (_FLOAT + BYTES) / self._kernels.system.host
        return on_gpu + Cost(network=moved, waits=1)

    @property
    def _stages(self) -> range:
        return range(self.load.layout.pp)

    def _layers(self, stage: int, micro: MicroBatches) -> list[tuple[DecoderLayer, int]]:
        """The kinds of layers of a stage and how many it has of each."""
        load, shape = self.load, self.load.shape
        tokens = max(1, round(micro.tokens / load.layout.cp))
        kinds: list[tuple[bool, int | None]] = [
            (bool(shape.sparse_layers and shape.sparse_layers[i]), None) for i in load.layers[stage]
        ]
        last = stage == load.layout.pp - 1 and load.layout.tp == 1  # with_early_select
        if last and load.lean_head and kinds and not kinds[-1][0]:
            kinds[-1] = False, self._outputs(tokens)
        return [
            (
                DecoderLayer(
                    *(self._kernels, shape, load.active, load.layout, sparse),
                    *(tokens, self._sequences.length, outputs),
                ),
                count,
            )
            for (sparse, outputs), count in Counter(kinds).items()
        ]

    def _outputs(self, tokens: int) -> int:
        """How many of a rank's tokens predict one of a response."""
        return max(1, round(tokens * self._sequences.response / self._sequences.length))

    def _forward(self, stage: int, micro: MicroBatches) -> Cost:
        cost = sum((one.forward * n for one, n in self._layers(stage, micro)), Cost())
        return (cost + self._ends(stage, micro, backward=False)).slower(TRAINER)

    def _backward(self, stage: int) -> Cost:
        cost = Cost()
        for one, count in self._layers(stage, self.training):
            cost += one.backward * count
            if self.load.recomputes:
                cost += one.forward * count
        return (cost + self._ends(stage, self.training, backward=True)).slower(TRAINER)

    def _ends(self, stage: int, micro: MicroBatches, backward: bool) -> Cost:
        """Embedding, head, and the messages between stages.

        Tensor-parallel ranks scatter the sum of their rows of the embedding (Megatron's
        ``VocabParallelEmbedding``) and gather hidden states for the policy's head, or the value
        head's outputs; the backward pass does the reverse, and nothing runs beside it.
        """
        layout, shape = self.load.layout, self.load.shape
        tokens = max(1, round(micro.tokens / layout.cp))
        hidden = tokens * shape.hidden * BYTES
        cost = Cost()
        if stage == 0:
            cost += streamed(self._kernels, 2 * hidden, 1) + self._exchange(hidden)
        if stage == layout.pp - 1:
            cost += self._head(tokens, backward)
            if self.load.policy:
                cost += self._exchange(hidden)
            elif not backward:
                cost += self._exchange(tokens * _FLOAT)
        if layout.pp > 1:
            distance, sent = layout.world // layout.pp, hidden / layout.tp
            cost += Cost(network=message_seconds(self._kernels, sent, distance), launches=2)
        return cost

    def _exchange(self, nbytes: float) -> Cost:
        tp = self.load.layout.tp
        seconds = collective_seconds(self._kernels, "all_gather", nbytes, Group(tp))
        return Cost(network=seconds, launches=tp > 1)

    def _head(self, tokens: int, backward: bool) -> Cost:
        """The vocabulary projection of response tokens with its log-probabilities in float32."""
        if not self.load.policy:
            return streamed(self._kernels, tokens * self.load.shape.hidden * BYTES, 2)
        rows, width = self._outputs(tokens), self.load.shape.vocab // self.load.layout.tp
        product = [(rows, width, self.load.shape.hidden)]
        cost = gemms(self._kernels, product, backward)
        if backward and self.load.lean_head:
            cost += gemms(self._kernels, product, False)
        return cost + streamed(self._kernels, rows * width * 4 * _FLOAT, 8)
