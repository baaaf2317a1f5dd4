"""Parameters and memory of one rank, counted from a model's parameter table and a role's layout.

An estimate for planning: allocator fragmentation, communication buffers and the framework itself
come on top.
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
class Count:
    """Parameters of one pipeline stage, on one rank: outside experts, and in experts."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

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
        vpp: chunks per stage; layers go round the stages once per chunk (Megatron's interleaving).
        first, last: layers of the first and last stage; the rest is shared evenly.
        chunks: layers of every chunk, where they are stated one by one.

    Returns:
        ``pp`` ascending lists that together hold every layer once.
    """
    if chunks is not None:
        bounds = [0, *accumulate(chunks)]
        return [
            [layer for i in range(stage, len(chunks), pp) for layer in range(*bounds[i : i + 2])]
            for stage in range(pp)
        ]
    stated = (first or 0) + (last or 0)
    stages = pp - (first is not None) - (last is not None)
    middle = (num_layers - stated) // stages if stages else 0
    sizes = [middle] * pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    owned: list[list[int]] = [[] for _ in range(pp)]
    layer = 0
    for _ in range(vpp):
        for stage, size in enumerate(sizes):
            owned[stage] += range(layer, layer + size // vpp)
            layer += size // vpp
    return owned


def count_parameters(
    table: Table, layout: Layout, stage: int, layers: list[int], value_head: bool
) -> Count:
    """Parameters that one rank of a pipeline stage holds.

    Args:
        table: the model's parameter table.
        layout: the role's layout.
        stage: pipeline stage.
        layers: decoder layers of the stage.
        value_head: the model ends in a value head instead of the vocabulary.
    """
    wanted = {"embedding"} if stage == 0 else set()
    if stage == layout.pp - 1:
        wanted |= {"final", "value" if value_head else "output"}
    dense = expert = 0
    for row in table.rows:
        shares_embedding = row.alias_of is not None and stage == 0
        if row.where in wanted and not shares_embedding:
            dense += _elements(Entry(row), layout)
    for layer in layers:
        for entry in table.layer_entries(layer):
            if entry.row.where == "expert":
                expert += _elements(entry, layout)
            else:
                dense += _elements(entry, layout)
    return Count(dense, expert // layout.ep)


def model_parameters(table: Table, value_head: bool = False) -> int:
    """Parameters of the whole model, tied embeddings counted once."""
    everything = list(range(table.shape.num_layers))
    return count_parameters(table, Layout(world=1), 0, everything, value_head).total


def experts_per_token(hf_config: Any) -> int:
    """Experts that one token visits, by the config's own name for it; 0 where it has none."""
    for key in ("num_experts_per_tok", "moe_top_k", "num_experts_per_token"):
        value = getattr(hf_config, key, None)
        if value:
            return int(value)
    return 0


def activation_elements_per_token(
    shape: ModelShape, layout: Layout, layer: int, visited: int
) -> float:
    """Elements that one decoder layer keeps for backward, per token, on one rank.

    Norm inputs and outputs ``4 h``, queries, keys, values and attention output
    ``(2 heads + 2 kv_heads) head_dim`` (flash attention keeps no score matrix), gate, up and their
    product ``3 ffn``; of a mixture, ``3 (shared_ffn + visited expert_ffn)`` under even load. All of
    it divided by TP (sequence parallelism; after Korthikanti et al. 2022, section 4).

    Args:
        shape: the model.
        layout: the role's layout.
        layer: decoder layer.
        visited: experts a token visits.
    """
    width = shape.ffn
    if shape.sparse_layers and shape.sparse_layers[layer]:
        width = shape.shared_ffn + visited * shape.expert_ffn
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return (4 * shape.hidden + attention + 3 * width) / layout.tp


def exchanged_elements_per_token(
    shape: ModelShape, layout: Layout, exchange: str, trained: bool
) -> float:
    """Elements of keys and values of all ranks, and of their gradients, that the attention of one
    layer holds at most, per token of the whole micro-batch, on one rank.

    Gathered, keys and values stand there as received and in the order of sequences, before a
    backward pass ends once more as gradients; a ring holds a rank's, the next's, and in a backward
    pass four times their gradients (``benchmarks/context_gather.py``).

    Args:
        shape: the model.
        layout: the role's layout.
        exchange: ``all_gather`` or ``p2p``.
        trained: whether there is a backward pass.
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
    count: Count,
    dtype: str,
    micro_batch_tokens: int,
    elements_per_token: Sequence[float],
    shape: ModelShape,
) -> Memory:
    """Memory of one rank for one role.

    Weights take ``b`` bytes per parameter. A trained role adds fp32 gradients (4), fp32 master
    weights where ``b`` is 2 (4) and Adam's two moments (8); under the distributed optimizer the
    last two are divided by the data-parallel size (experts: by theirs). Activations of the
    micro-batches in flight: stage ``s`` of ``p`` holds ``p - s`` under 1F1B, and at most
    ``p + (p - 1) / v`` under interleaving with ``v`` chunks (Narayanan et al. 2021). Full
    recomputation keeps a layer's input only, plus one layer at work. Under context parallelism the
    exchanged keys and values of a layer come on top. The head keeps a chunk of fp32 logits, three
    times in backward.

    Args:
        role: which role.
        layout: its layout.
        stage: pipeline stage.
        count: parameters of this rank.
        dtype: parameters' dtype.
        micro_batch_tokens: tokens of the largest micro-batch.
        elements_per_token: by layer of the stage, from ``activation_elements_per_token``.
        shape: the model.
    """
    size = BYTES[dtype]
    trained = role.name in ("actor", "critic")
    gradients = optimizer = 0
    if trained:
        gradients = 4 * count.total
        split = (layout.dp * layout.cp, layout.edp)
        if not role.megatron.use_distributed_optimizer:
            split = (1, 1)
        per_parameter = 8 + (4 if size == 2 else 0)
        optimizer = per_parameter * (count.dense // split[0] + count.expert // split[1])
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
    exchange = role.megatron.key_exchange(latent=shape.mla is not None)
    exchanged = exchanged_elements_per_token(shape, layout, exchange, trained)
    held = int((kept * tokens + exchanged * micro_batch_tokens) * size)
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
