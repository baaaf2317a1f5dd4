"""Memory of a GPU outside the trainer's allocator: CUDA contexts, NCCL's communicators, and a
rollout engine on the same GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from mppo.parallel.layout import Coordinates, Layout
from mppo.pipeline.routes import routes
from mppo.planning.memory import BYTES
from mppo.recipe.gpu_types import GIB, MIB, GpuType
from mppo.recipe.model_shape import ModelShape
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.recipe.schema import Recipe

CUDA_CONTEXT = int(0.6 * GIB)
"""Bytes of a process's CUDA context: driver, kernel code, cuBLAS workspaces. Published measurements
lie between 0.4 and 0.8 GiB."""
ALL_KERNELS = 666_632_192 - 287_047_680
"""Bytes that the context of a trainer's rank has besides, because it loads all kernels at the start
(``mppo.parallel.environment``): measured for torch 1.13 with and without lazy loading, see
https://github.com/pytorch/pytorch/pull/86509."""
TRAINER_CONTEXT = CUDA_CONTEXT + ALL_KERNELS
NCCL_COMMUNICATOR = 128 * MIB
"""Bytes of the buffers of one NCCL communicator with default settings on NVLink."""

ENGINE_GRAPHS = int(1.5 * GIB)
"""Bytes of an SGLang server's CUDA graphs and workspaces per GPU; it keeps them asleep."""
LEAST_SEQUENCES = 32
"""Number of sequences of the greatest length for which a server's KV cache must have room, unless
it generates fewer at the same time."""
STATIC_SHARE = 0.85
"""Share of the free memory that an SGLang server takes for weights and KV cache if the recipe does
not set ``rollout.server_args.mem_fraction_static``; SGLang chooses about this much."""


def communicators(roles: Iterable[tuple[Layout, bool, bool, bool]], rank: int) -> int:
    """Number of NCCL communicators that a rank uses.

    One for all groups with the same ranks (``mppo.parallel.shared_groups``), one for a pipeline's
    broadcasts, and for the messages of its passes one for each pair of neighbours and direction
    (``mppo.pipeline.routes``).

    Args:
        roles: each role's layout, whether it has experts on this rank, whether it is trained,
            and whether its router's biases move.
    """
    found: set[Any] = set()
    for layout, has_experts, trained, moves_biases in set(roles):
        here = layout.coordinates(rank)
        everyone = [(other, layout.coordinates(other)) for other in range(layout.world)]
        axes = _AXES + _EXPERT_AXES * has_experts
        if trained:
            axes += _GRADIENT_AXES + _EXPERT_GRADIENT_AXES * has_experts
            axes += _BIAS_AXES * (has_experts and moves_biases)
        for same in axes:
            found.add(tuple(other for other, at in everyone if same(at) == same(here)))
        if layout.pp > 1:
            found.add(("pipeline", layout.pp))
            found |= {(*way, layout.pp) for way in routes(here.pp, layout.pp, layout.vpp)}
    return sum(len(ranks) > 1 for ranks in found)


Axes = tuple[Callable[[Coordinates], Any], ...]
"""For some groups, the coordinates that the ranks of a group have in common."""

_AXES: Axes = (
    lambda at: (at.pp, at.dp, at.cp),  # TP
    lambda at: (at.pp, at.tp, at.dp),  # CP
)
_EXPERT_AXES: Axes = (
    lambda at: (at.pp, at.edp, at.etp),  # EP
    lambda at: (at.pp, at.edp, at.ep),  # ETP
)
_GRADIENT_AXES: Axes = (
    lambda at: (at.pp, at.tp),  # DP and CP
    lambda at: (),  # all ranks: norms
)
_EXPERT_GRADIENT_AXES: Axes = (
    lambda at: (at.pp, at.ep, at.etp),  # data parallelism of experts
)
_BIAS_AXES: Axes = (
    lambda at: (at.pp,),  # all ranks of a stage: loads of the experts
)


def outside_bytes(count: int) -> dict[str, int]:
    """Bytes of a rank outside torch's allocator by purpose, with ``count`` communicators."""
    return {"CUDA context": TRAINER_CONTEXT, "NCCL": count * NCCL_COMMUNICATOR}


@dataclass(frozen=True)
class Engine:
    """A rollout engine's memory on each GPU that it shares with the trainer.

    Args:
        graphs: bytes of its CUDA graphs and workspaces.
        kv_per_token: bytes of its KV cache per token of a sequence; 0: unknown.
        sequences: number of sequences for which the KV cache must have room.
        share: share of the GPU's free memory that weights and KV cache take; None: no limit.
    """

    weights: int
    graphs: int
    context: int
    kv_per_token: int
    sequences: int
    longest: int
    share: float | None

    def with_fewer_sequences(self) -> list[Engine]:
        """This engine, then with half of the sequences, and so on down to ``LEAST_SEQUENCES``."""
        counts = [self.sequences]
        while counts[-1] > LEAST_SEQUENCES:
            counts.append(max(LEAST_SEQUENCES, counts[-1] // 2))
        return [replace(self, sequences=count) for count in counts]

    @property
    def cache(self) -> int:
        return self.sequences * self.longest * self.kv_per_token

    @property
    def asleep(self) -> dict[str, int]:
        """Bytes by purpose while the trainer computes."""
        parts = {"engine's graphs": self.graphs, "engine's CUDA context": self.context}
        return {name: size for name, size in parts.items() if size}

    @property
    def with_weights(self) -> dict[str, int]:
        """Bytes by purpose from a weight sync on."""
        return {"engine's weights": self.weights, **self.asleep}

    @property
    def generating(self) -> dict[str, int]:
        if not self.cache:
            return self.with_weights
        return {**self.with_weights, f"KV cache of {self.sequences} sequences": self.cache}

    def kv_tokens(self, free: int) -> int:
        """Tokens for which the KV cache has room in ``free`` bytes that it shares with the
        weights."""
        room = free
        if self.share is not None:
            # the share of what is free before the server's graphs exist
            room = min(free, int((free + self.graphs) * self.share))
        return max(0, (room - self.weights) // self.kv_per_token)


def colocated_engine(
    recipe: Recipe, world_size: int, shape: ModelShape, parameters: int
) -> Engine | None:
    """Memory of the engine on each GPU; None if it is on other GPUs.

    Its KV cache is to have room for all sequences that it generates at the same time.
    ``parameters`` is of the complete model.
    """
    rollout = recipe.rollout
    if rollout.mode != "colocated" or rollout.urls:
        return None
    tp = rollout.tensor_model_parallel_size
    servers = rollout.servers or max(1, world_size // tp)
    return _engine(recipe, servers, shape, parameters)


def own_kv_tokens(recipe: Recipe, shape: ModelShape, parameters: int, gpu: GpuType) -> int:
    """Tokens for which the KV cache of a server on GPUs of its own has room."""
    engine = _engine(recipe, max(1, len(recipe.rollout.urls)), shape, parameters)
    return engine.kv_tokens(gpu.nbytes - engine.context - engine.graphs)


def _engine(recipe: Recipe, servers: int, shape: ModelShape, parameters: int) -> Engine:
    rollout = recipe.rollout
    width = BYTES[rollout.dtype or recipe.model.dtype]
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    tp = rollout.tensor_model_parallel_size
    responses = ceil(recipe.data.train_batch_size * rollout.n / servers)
    sequences = min(rollout.batch_size, responses)
    per_token = _kv_elements(shape, tp) * width
    if rollout.name == "local":  # gathers the actor's weights into a model of its own
        return Engine(parameters * width, 0, 0, per_token, sequences, longest, None)
    share = sglang_options(rollout.server_args).get("mem_fraction_static", STATIC_SHARE)
    return Engine(
        parameters * width // tp,
        ENGINE_GRAPHS,
        CUDA_CONTEXT,
        per_token,
        sequences,
        longest,
        float(share),
    )


def _kv_elements(shape: ModelShape, tp: int) -> int:
    """Elements of the KV cache of a token on one GPU."""
    if shape.mla is not None:  # SGLang keeps the compressed form, replicated on every rank
        return shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim)
    return 2 * shape.num_layers * max(1, shape.kv_heads // tp) * shape.head_dim
