"""Parameters and memory of one rank, from a model's parameter table and a role's layout.

The estimate leaves out allocator fragmentation, communication buffers and the CUDA context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mppo.config.rules.rule import RoleCase
from mppo.parallel.layout import Layout
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.shape import ModelShape
from mppo.weights.table import Entry, Table

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one pipeline stage on one rank.

    Args:
        dense: parameters outside of experts.
        expert: parameters of experts.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Memory:
    """Bytes of one role on one rank.

    Args:
        weights: parameters in the model's type.
        gradients: float32 gradients.
        optimizer: Adam's moments and master weights.
        activations: activations at the peak, exchanged keys and values included.
        head: chunk of logits.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


def stage_layers(
    num_layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    chunks: Sequence[int] | None = None,
) -> list[list[int]]:
    """Decoder layers of every pipeline stage.

    Args:
        num_layers: layers of the model.
        pp: stages.
        vpp: chunks per stage; layers are dealt to the stages once per chunk (Megatron's
            interleaving).
        first, last: layers of the first and last stage; the others divide the rest evenly.
        chunks: number of layers of every chunk, in model order; replaces ``first`` and ``last``.

    Returns:
        For each stage its layers, ascending; every layer is in one list.
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


def role_stage_layers(role: RoleCase, num_layers: int, world_size: int) -> list[list[int]]:
    """Decoder layers of every pipeline stage of a role, see ``stage_layers``."""
    m = role.megatron
    layout = m.layout(world_size)
    ends = m.num_layers_in_first_pipeline_stage, m.num_layers_in_last_pipeline_stage
    return stage_layers(num_layers, layout.pp, layout.vpp, *ends, m.pipeline_layers)


def count_parameters(
    table: Table, layout: Layout, stage: int, layers: list[int], value_head: bool
) -> ParameterCount:
    """Parameters that one rank of a pipeline stage holds.

    Args:
        table: the model's parameter table.
        layout: the role's layout.
        stage: pipeline stage.
        layers: decoder layers of the stage.
        value_head: the model ends in a value head instead of the vocabulary.
    """
    ends: set[str] = {"embedding"} if stage == 0 else set()
    if stage == layout.pp - 1:
        ends |= {"final", "value" if value_head else "output"}
    dense = expert = 0
    for row in table.rows:
        # a tied output shares the embedding's memory if the first stage is also the last
        shares_embedding = row.alias_of is not None and stage == 0
        if row.where in ends and not shares_embedding:
            dense += _elements(Entry(row), layout)
    for layer in layers:
        for entry in table.layer_entries(layer):
            if entry.row.where == "expert":
                expert += _elements(entry, layout)
            else:
                dense += _elements(entry, layout)
    return ParameterCount(dense, expert // layout.ep)


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


def activation_elements_per_token(
    shape: ModelShape, layout: Layout, layer: int, active_experts: int
) -> float:
    """Elements that one decoder layer stores for the backward pass, per token, on one rank.

    Norm inputs and outputs ``4 h``, queries, keys, values and attention output
    ``(2 heads + 2 kv_heads) head_dim`` (flash attention stores no score matrix), gate, up and their
    product ``3 ffn``; in a mixture of experts ``3 (shared_ffn + active_experts expert_ffn)`` for an
    even load. TP divides all of them (sequence parallelism; Korthikanti et al. 2022, section 4).

    Args:
        shape: the model.
        layout: the role's layout.
        layer: decoder layer.
        active_experts: experts that process a token.
    """
    width = shape.ffn
    if shape.sparse_layers and shape.sparse_layers[layer]:
        width = shape.shared_ffn + active_experts * shape.expert_ffn
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return (4 * shape.hidden + attention + 3 * width) / layout.tp


def exchanged_elements_per_token(
    shape: ModelShape, layout: Layout, exchange: str, trained: bool
) -> float:
    """Peak of one layer's exchanged keys, values and their gradients under context parallelism:
    elements per token of the micro-batch (over all context-parallel ranks), on one rank.

    ``all_gather`` holds keys and values twice, as received and in sequence order, and in a backward
    pass their gradients. ``p2p`` holds the keys and values of one rank and of the next, and in a
    backward pass four times as many gradients (measured by ``benchmarks/context_gather.py``).

    Args:
        shape: the model.
        layout: the role's layout.
        exchange: ``all_gather`` or ``p2p``.
        trained: whether the role has a backward pass.
    """
    if layout.cp == 1:
        return 0.0
    width = 2.0 * shape.kv_heads * shape.head_dim
    if shape.mla is not None:
        key = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim
        width = float(shape.heads * (key + shape.mla.v_head_dim))
    if exchange == "all_gather":
        return width / layout.tp * (3 if trained else 2)
    return width / layout.tp * (6 if trained else 2) / layout.cp


def role_memory(
    role: RoleCase,
    layout: Layout,
    stage: int,
    count: ParameterCount,
    dtype: str,
    micro_batch_tokens: int,
    elements_per_token: Sequence[float],
    shape: ModelShape,
) -> Memory:
    """Memory of one role on one rank.

    Weights take ``b`` bytes per parameter. A trained role adds fp32 gradients (4), fp32 master
    weights if ``b`` is 2 (4) and Adam's two moments (8); the distributed optimizer divides the last
    two by the data-parallel size (of experts: by the expert-data-parallel size). Activations of the
    micro-batches in flight: stage ``s`` of ``p`` holds ``p - s`` under 1F1B, and at most
    ``p + (p - 1) / v`` under interleaving with ``v`` chunks (Narayanan et al. 2021). Full
    recomputation stores only the inputs of layers, plus the activations of one layer. Context
    parallelism adds one layer's exchanged keys and values. The head holds a chunk of fp32 logits,
    and in a backward pass three times as much.

    Args:
        role: the role.
        layout: its layout.
        stage: pipeline stage.
        count: parameters of this rank.
        dtype: parameters' dtype.
        micro_batch_tokens: tokens of the largest micro-batch.
        elements_per_token: by layer of the stage, from ``activation_elements_per_token``.
        shape: the model.
    """
    size = BYTES[dtype]
    # gradients and optimizer states: in float32, and only of a trained role
    trained = role.name in ("actor", "critic")
    gradients = optimizer = 0
    if trained:
        gradients = 4 * count.total
        split = (layout.dp * layout.cp, layout.edp)
        if not role.megatron.use_distributed_optimizer:
            split = (1, 1)
        per_parameter = 8 + (4 if size == 2 else 0)  # moments, and master weights of bfloat16
        optimizer = per_parameter * (count.dense // split[0] + count.expert // split[1])
    # activations: of the micro-batches in flight if trained, else of one layer at a time
    tokens = micro_batch_tokens / layout.cp
    widest = max(elements_per_token, default=0.0)
    in_flight = float(layout.pp - stage)
    if layout.vpp > 1:
        in_flight = layout.pp + (layout.pp - 1) / layout.vpp
    if not trained:
        kept = widest
    elif role.megatron.recompute_granularity == "full":
        kept = in_flight * len(elements_per_token) * shape.hidden / layout.tp + widest
    else:
        kept = in_flight * sum(elements_per_token)
    exchange = role.megatron.key_exchange(has_mla=shape.mla is not None)
    exchanged = exchanged_elements_per_token(shape, layout, exchange, trained)
    held = int((kept * tokens + exchanged * micro_batch_tokens) * size)
    # the critic's value head has one logit per token, too little to count
    head = 0
    if stage == layout.pp - 1 and role.name != "critic":
        chunk = min(role.section.head_chunk_tokens, math.ceil(tokens))
        logits = chunk * padded_vocab_size(shape.vocab, layout.tp) // layout.tp
        head = 4 * logits * (3 if trained else 1)
    return Memory(count.total * size, gradients, optimizer, held, head)


def _elements(entry: Entry, layout: Layout) -> int:
    row = entry.row
    size = layout.etp if row.group == "etp" else layout.tp
    padded = padded_vocab_size(row.shapes[0][0], layout.tp) if row.kind == "vocab" else 0
    return math.prod(entry.shard_shape(size, padded))
