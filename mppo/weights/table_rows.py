"""The rows of the parameter table, and the function that lists a model's.

``docs/adding_a_family.md`` shows how to add rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mppo.recipe.model_shape import ModelShape
from mppo.weights.blocks import BlockKind
from mppo.weights.names import HFNames, hf_names

Where = Literal["embedding", "layer", "dense", "sparse", "expert", "final", "output", "value"]
Group = Literal["tp", "etp"]
Shape = tuple[int, ...]

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Row:
    """One parameter, or one per layer, or one per layer and expert.

    Args:
        name: Megatron name; inside a layer relative to the layer, with ``{e}`` for the expert.
        hf: Hugging Face names with ``{l}`` for the layer and ``{e}`` for the expert.
        shapes: shape of each Hugging Face tensor.
        kind: layout of those tensors in the parameter, see ``mppo.weights.blocks``.
        dim: sharded dimension; None: replicated over the group.
        where: part of the model; ``dense`` and ``sparse`` are kinds of layers.
        group: group over which ``dim`` is sharded.
        fuse_group: rows of a layer with the same value are sent to an engine in one bucket, because
            the engine fuses their tensors.
        aliases: names of the same parameter in other layer specs.
        keep_fp32: stays float32 for every model dtype.
        alias_of: name of the row that has the same Hugging Face tensors; this row is loaded, but
            never exported.
        optional: may be absent from the Hugging Face folder.
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    kind: BlockKind = "copy"
    dim: int | None = None
    where: Where = "layer"
    group: Group = "tp"
    fuse_group: str | None = None
    aliases: tuple[str, ...] = ()
    keep_fp32: bool = False
    alias_of: str | None = None
    optional: bool = False


def model_rows(shape: ModelShape) -> tuple[Row, ...]:
    names = hf_names(shape.model_type)
    rows = _embeddings(shape, names)
    matrices = _mla_attention(shape, names) if shape.mla else _attention(shape, names)
    dense = (*names.mlp_in, names.mlp_out)
    matrices += _feed_forward("mlp.", names.layer, dense, shape.ffn, shape, "dense")
    final = Row(
        "decoder.final_layernorm.weight", (f"{names.final_norm}.weight",), ((shape.hidden,),),
        where="final",
    )  # fmt: skip
    for row in (*_norms(shape, names), *matrices, final):
        rows += [row, _bias(row)] if shape.biases else [row]
    if any(shape.sparse_layers):
        rows += _experts(shape, names)
    return (*rows, *_heads(shape, names))


def _bias(row: Row) -> Row:
    """The bias beside a weight: one number for each of its rows, cut with them."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name.removesuffix('weight')}bias" for name in names)

    return replace(
        row,
        name=renamed((row.name,))[0],
        hf=renamed(row.hf),
        shapes=tuple((shape[0],) for shape in row.shapes),
        dim=0 if row.dim == 0 else None,
        aliases=renamed(row.aliases),
    )


def _embeddings(shape: ModelShape, names: HFNames) -> list[Row]:
    vocab = ((shape.vocab, shape.hidden),)
    rows = [Row(_EMBEDDING, (f"{names.embedding}.weight",), vocab, "vocab", 0, "embedding")]
    if shape.positions:
        rows.append(
            Row(
                "embedding.position_embeddings.weight", (f"{names.positions}.weight",),
                ((shape.positions, shape.hidden),), where="embedding",
            )
        )  # fmt: skip
    return rows


def _heads(shape: ModelShape, names: HFNames) -> list[Row]:
    projection = names.embedding if shape.tied else names.head
    return [
        Row(
            "output_layer.weight", (f"{projection}.weight",), ((shape.vocab, shape.hidden),),
            "vocab", 0, "output", alias_of=_EMBEDDING if shape.tied else None,
        ),
        Row(
            "value_head.weight", ("score.weight",), ((shape.value_bins, shape.hidden),),
            where="value", optional=True,
        ),
    ]  # fmt: skip


def _norms(shape: ModelShape, names: HFNames) -> list[Row]:
    def norm(name: str, hf: str, *aliases: str, where: Where = "layer") -> Row:
        return Row(
            f"{name}.weight", (f"{names.layer}{hf}.weight",), ((shape.hidden,),), where=where,
            aliases=tuple(f"{alias}weight" for alias in aliases),
        )  # fmt: skip

    fused = () if shape.mla else ("self_attention.linear_qkv.layer_norm_",)
    rows = [
        norm("input_layernorm", names.attention_norm, *fused),
        norm("pre_mlp_layernorm", names.mlp_norm, "mlp.linear_fc1.layer_norm_"),
    ]
    if shape.sandwich_norms:
        rows += [
            norm(
                "post_attention_layernorm", names.attention_post_norm,
                "self_attention.linear_proj.post_layernorm.",
            ),
            norm(
                "post_mlp_layernorm", names.mlp_post_norm, "mlp.linear_fc2.post_layernorm."
            ),
        ]  # fmt: skip
    return rows


def _attention(shape: ModelShape, names: HFNames) -> list[Row]:
    own, out = "self_attention.", f"{names.layer}{names.attention_out}.weight"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sources = tuple(f"{names.layer}{name}.weight" for name in names.qkv)
    # a projection to all three has Megatron's order already
    separate = len(sources) > 1
    widths = (queries, keys, keys) if separate else (queries + 2 * keys,)
    qkv = Row(
        f"{own}linear_qkv.weight", sources, tuple((width, shape.hidden) for width in widths),
        "qkv" if separate else "copy", 0, fuse_group="qkv",
    )  # fmt: skip
    rows = [qkv, Row(f"{own}linear_proj.weight", (out,), ((shape.hidden, queries),), dim=1)]
    if shape.qkv_bias and not shape.biases:
        rows.append(_bias(qkv))
    if shape.qk_norm:
        rows += [
            Row(
                f"{own}{x}_layernorm.weight", (f"{names.layer}self_attn.{x}_norm.weight",),
                ((shape.head_dim,),),
            )
            for x in "qk"
        ]  # fmt: skip
    return rows


def _mla_attention(shape: ModelShape, names: HFNames) -> list[Row]:
    mla, own, hf = shape.mla, "self_attention.", f"{names.layer}self_attn."
    assert mla is not None
    queries = shape.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    key_values = shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank

    def linear(
        name: str, of: str, out: int, into: int, dim: int = 0, fused: str | None = None
    ) -> Row:
        return Row(
            f"{own}{name}.weight", (f"{hf}{of}.weight",), ((out, into),), dim=dim, fuse_group=fused
        )

    def norm(name: str, of: str, width: int, up: str) -> Row:
        alias = (f"{own}{up}.layer_norm_weight",)
        return Row(f"{own}{name}.weight", (f"{hf}{of}.weight",), ((width,),), aliases=alias)

    if q_rank is None:
        rows = [linear("linear_q_proj", "q_proj", queries, shape.hidden)]
    else:
        rows = [
            linear("linear_q_down_proj", "q_a_proj", q_rank, shape.hidden, fused="a"),
            norm("q_layernorm", "q_a_layernorm", q_rank, "linear_q_up_proj"),
            linear("linear_q_up_proj", "q_b_proj", queries, q_rank),
        ]
    width = kv_rank + mla.qk_rope_head_dim
    fuse_group = None if q_rank is None else "a"
    return [
        *rows,
        linear("linear_kv_down_proj", "kv_a_proj_with_mqa", width, shape.hidden, fused=fuse_group),
        norm("kv_layernorm", "kv_a_layernorm", kv_rank, "linear_kv_up_proj"),
        linear("linear_kv_up_proj", "kv_b_proj", key_values, kv_rank),
        linear("linear_proj", "o_proj", shape.hidden, shape.heads * mla.v_head_dim, dim=1),
    ]


def _feed_forward(
    own: str, of: str, names: tuple[str, ...], width: int, shape: ModelShape, where: Where
) -> list[Row]:
    """Rows of a feed-forward: prefixes of the Megatron and the Hugging Face names, then names of
    the input projections (gate and up, or only one) and of the output projection."""
    *into, out = (f"{of}{name}.weight" for name in names)
    products = (1 + shape.gated) // len(into)
    wide, narrow = (products * width, shape.hidden), (shape.hidden, width)
    group: Group = "etp" if where == "expert" else "tp"
    kind: BlockKind = "gated" if shape.gated else "copy"
    rows = [
        Row(
            f"{own}linear_fc1.weight", tuple(into), (wide,) * len(into), kind, 0, where, group
        ),
        Row(f"{own}linear_fc2.weight", (out,), (narrow,), dim=1, where=where, group=group),
    ]  # fmt: skip
    if where == "expert":
        rows = [replace(row, aliases=(_grouped_name(row.name),)) for row in rows]
    return rows


def _grouped_name(name: str) -> str:
    return f"mlp.experts.{name.removeprefix('mlp.experts.local_experts.{e}.')}{{e}}"


def _experts(shape: ModelShape, names: HFNames) -> list[Row]:
    of, count = f"{names.layer}{names.mixture}", shape.num_experts
    rows = [
        Row(
            "mlp.router.weight", (f"{of}gate.weight",), ((count, shape.hidden),), where="sparse"
        ),
        *_feed_forward(
            "mlp.experts.local_experts.{e}.", f"{of}experts.{{e}}.", names.expert,
            shape.expert_ffn, shape, "expert",
        ),
    ]  # fmt: skip
    if shape.expert_bias:
        rows.append(
            Row(
                "mlp.router.expert_bias", (f"{of}gate.e_score_correction_bias",), ((count,),),
                where="sparse", keep_fp32=True,
            )
        )  # fmt: skip
    if shape.shared_ffn:
        rows += _feed_forward(
            "mlp.shared_experts.", f"{of}{names.shared}.", names.expert, shape.shared_ffn, shape,
            "sparse",
        )  # fmt: skip
    if shape.shared_gate:
        rows.append(
            Row(
                "mlp.shared_experts.gate_weight", (f"{of}{names.shared}_gate.weight",),
                ((1, shape.hidden),), where="sparse",
            )
        )  # fmt: skip
    return rows
