"""The parameter of SGLang that holds an entry: its name, and its shape on one tensor-parallel rank.

SGLang fuses tensors that are separate in a checkpoint: queries, keys and values; gate and up; all
experts of a layer; MLA's two down projections. The order inside a fused parameter is that of
``mppo.weights.slices.reshard.engine_blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mppo.weights.shape import ModelShape
from mppo.weights.slices.reshard import engine_blocks
from mppo.weights.table import Entry


@dataclass(frozen=True)
class EngineTensor:
    """One entry inside a parameter of a rollout rank.

    Args:
        name: SGLang's name of the parameter.
        shape: of the full parameter on that rank.
        expert: index along the parameter's first dimension; None: it holds no experts.
        first: first index of the entry along its ``cut_dim`` (within its expert).
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    first: int


def engine_tensor(
    entry: Entry,
    shape: ModelShape,
    rank: int,
    size: int,
    vocab_multiple: int = 64,
    expert_parallel: int = 1,
) -> EngineTensor:
    """The place of an entry on tensor-parallel rank ``rank`` of ``size``, which holds a part of it.

    Args:
        vocab_multiple: the engine pads its vocabulary to a multiple of this.
        expert_parallel: groups of the engine's ranks among which its experts are divided.
    """
    row, dim = entry.row, entry.cut_dim
    blocks = engine_blocks(entry, shape, rank, size, vocab_multiple, expert_parallel)
    assert blocks
    first, length = 0, sum(block.length for block in blocks)
    if row.fuse_group == "a":  # the down projection of queries, then that of keys and values
        assert shape.mla is not None
        assert shape.mla.q_lora_rank is not None
        queries = shape.mla.q_lora_rank
        keys = shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim
        first, length = (0 if ".q_a_proj." in entry.hf[0] else queries), queries + keys
    full = row.shapes[0]
    local = (*full[:dim], length, *full[dim + 1 :])
    expert = entry.expert
    if expert is not None:
        experts = shape.num_experts // expert_parallel
        expert, local = expert % experts, (experts, *local)
    return EngineTensor(_engine_name(entry), local, expert, first)


def _engine_name(entry: Entry) -> str:
    row, name = entry.row, entry.hf[0]
    if entry.expert is not None:
        layer = name[: name.index(f".experts.{entry.expert}.")]
        return f"{layer}.experts.{'w13' if row.kind == 'gated' else 'w2'}_weight"
    if row.kind == "qkv":
        return name.replace(".q_proj.", ".qkv_proj.")
    if row.kind == "gated":
        return name.replace(".gate_proj.", ".gate_up_proj.")
    if row.fuse_group == "a":
        return f"{name.rsplit('.', 2)[0]}.fused_qkv_a_proj_with_mqa.weight"
    return name
