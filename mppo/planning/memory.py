"""Parameters of one rank, and the memory that they keep, from a model's parameter table and a
role's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

from mppo.parallel.layout import Layout
from mppo.recipe.sections.role_config import RoleConfig
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.frozen import is_frozen
from mppo.weights.table import Entry, Table

BYTES = {"float32": 4, "bfloat16": 2}
_DOWN_PROJECTIONS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one pipeline stage on one rank.

    Args:
        discarded: the vocabulary projection that Megatron builds before a value head replaces it.
    """

    dense: int
    expert: int
    discarded: int = 0
    frozen_dense: int = 0
    frozen_expert: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Memory:
    """Bytes of one role on one rank between steps.

    Args:
        gradients: float32 gradients.
        optimizer: Adam's moments and master weights.
        building: most bytes while the role is built.
        on_cpu: bytes in host memory of the share of the optimizer that the CPU updates.
    """

    weights: int
    gradients: int
    optimizer: int
    building: int
    on_cpu: int = 0

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer


def stage_layers(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    chunks: Sequence[int] | None = None,
) -> list[list[int]]:
    """Decoder layers of every pipeline stage, ascending.

    Args:
        vpp: chunks per stage; layers are dealt to the stages once per chunk (Megatron's
            interleaving).
        first, last: layers of the first and last stage; the others divide the rest evenly.
        chunks: number of layers of every chunk, in model order; replaces ``first`` and ``last``.
    """
    if chunks is not None:  # chunk i belongs to stage i mod pp
        bounds = [0, *accumulate(chunks)]
        return [
            [layer for i in range(stage, len(chunks), pp) for layer in range(*bounds[i : i + 2])]
            for stage in range(pp)
        ]
    given = (first or 0) + (last or 0)
    stages = pp - (first is not None) - (last is not None)
    middle = (num_layers - given) // stages if stages else 0
    sizes = [middle] * pp
    # the first and last stage also hold the embedding and the head: a recipe may give them fewer
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    # layers in model order: each chunk of all stages comes before the next chunk
    owned: list[list[int]] = [[] for _ in range(pp)]
    layer = 0
    for _ in range(vpp):
        for stage, size in enumerate(sizes):
            owned[stage] += range(layer, layer + size // vpp)
            layer += size // vpp
    return owned


def role_stage_layers(role: RoleConfig, num_layers: int, world_size: int) -> list[list[int]]:
    """Decoder layers of every pipeline stage of a role, see ``stage_layers``."""
    m = role.megatron
    layout = m.layout(world_size)
    ends = m.num_layers_in_first_pipeline_stage, m.num_layers_in_last_pipeline_stage
    return stage_layers(num_layers, layout.pp, layout.vpp, *ends, m.pipeline_layers)


def count_parameters(
    table: Table,
    layout: Layout,
    stage: int,
    layers: list[int],
    value_head: bool,
    freeze: Sequence[str] = (),
) -> ParameterCount:
    """Parameters that one rank of a pipeline stage holds; ``freeze`` has patterns of layers'
    parameters that are not trained (``mppo.weights.frozen``)."""
    ends: set[str] = {"embedding"} if stage == 0 else set()
    if stage == layout.pp - 1:
        ends |= {"final", "value" if value_head else "output"}
    dense = expert = frozen_dense = frozen_expert = 0
    for row in table.rows:
        # a tied output shares the embedding's memory if the first stage is also the last
        shares_embedding = row.alias_of is not None and stage == 0
        if row.where in ends and not shares_embedding:
            dense += _elements(Entry(row), layout)
    for layer in layers:
        for row in table.rows:
            if not table.applies(row, layer):
                continue
            # the experts of a layer are alike: one of them is counted
            is_expert = row.where == "expert"
            entry = Entry(row, layer, 0) if is_expert else Entry(row, layer)
            elements = _elements(entry, layout)
            frozen = elements if is_frozen(entry, freeze) else 0
            if is_expert:
                experts = table.shape.num_experts
                expert += experts * elements
                frozen_expert += experts * frozen
            else:
                dense, frozen_dense = dense + elements, frozen_dense + frozen
    for row in table.rows if freeze else ():
        if row.where == "final" and row.where in ends and is_frozen(Entry(row), freeze):
            frozen_dense += _elements(Entry(row), layout)
    replaced = value_head and "final" in ends
    discarded = _elements(table.projection_entry(), layout) if replaced else 0
    split = expert // layout.ep, frozen_expert // layout.ep
    return ParameterCount(dense, split[0], discarded, frozen_dense, split[1])


_LAYERS = ("layer", "dense", "sparse")
"""Kinds of rows of a layer that no expert has."""


def trains_gathering(table: Table, layers: Sequence[int], freeze: Sequence[str]) -> bool:
    """Whether a matrix of these layers that gathers its input is trained: one that sequence
    parallelism cuts by outputs. Experts get their tokens from the dispatcher."""
    entries = (
        Entry(row, layer)
        for layer in layers
        for row in table.rows
        if row.where in _LAYERS and row.dim == 0 and table.applies(row, layer)
    )
    return not all(is_frozen(entry, freeze) for entry in entries)


def model_parameters(table: Table, value_head: bool = False) -> int:
    """Parameters of the model; tied embeddings count once."""
    everything = list(range(table.shape.num_layers))
    return count_parameters(table, Layout(world=1), 0, everything, value_head).total


def experts_per_token(hf_config: Any) -> int:
    """Experts that process one token, under any name in the config; 0 for a dense model."""
    for key in ("num_experts_per_tok", "moe_top_k", "num_experts_per_token"):
        value = getattr(hf_config, key, None)
        if value:
            return int(value)
    return 0


def role_memory(
    role: RoleConfig, layout: Layout, count: ParameterCount, dtype: str, cpu_share: float = 0.0
) -> Memory:
    """Memory that one role keeps on one rank.

    Weights take ``b`` bytes per parameter. A trained role adds fp32 gradients (4), fp32 master
    weights if ``b`` is 2 (4) and Adam's two moments (8); the distributed optimizer divides the last
    two by the data-parallel size (of experts: by the expert-data-parallel size). Before the
    optimizer is made, Megatron's DDP replaces the weights by one buffer for those outside of
    experts and one for experts, with their gradients; the old weights are freed when a buffer is
    complete. Parameters that ``critic.freeze`` names take the weights' bytes only.

        cpu_share: share of the moments that the CPU holds and updates. It also holds float32 copies
            of these main weights and of their gradients.
    """
    size = BYTES[dtype]
    dense, expert = count.dense - count.frozen_dense, count.expert - count.frozen_expert
    weights, gradients = count.total * size, 4 * (dense + expert)
    if not role.trained:
        return Memory(weights, 0, 0, building=weights + count.discarded * size)
    split, buffers = (layout.dp * layout.cp, layout.edp), (dense * size, expert * size)
    if not role.megatron.use_distributed_optimizer:
        split, buffers = (1, 1), (0, 0)
    own = dense // split[0] + expert // split[1]
    on_cpu = int(own * cpu_share)
    # moments, and master weights of bfloat16
    optimizer = 8 * (own - on_cpu) + (4 * own if size == 2 else 0)
    buffering = weights + max(buffers[0] + 4 * dense, buffers[1] + gradients)
    building = max(buffering, weights + gradients + optimizer)
    return Memory(weights, gradients, optimizer, building, on_cpu=(8 + 4 + 4) * on_cpu)


def transformer_engine_is_installed() -> bool:
    """Whether Transformer Engine is installed here. Its layers divide latent attention's down
    projections over no ranks."""
    return find_spec("transformer_engine") is not None


def _elements(entry: Entry, layout: Layout) -> int:
    row = entry.row
    size = layout.etp if row.group == "etp" else layout.tp
    if row.name.endswith(_DOWN_PROJECTIONS) and transformer_engine_is_installed():
        size = 1
    padded = padded_vocab_size(row.shapes[0][0], layout.tp) if row.kind == "vocab" else 0
    return math.prod(entry.shard_shape(size, padded))
