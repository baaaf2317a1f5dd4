"""The parameter table: one row per parameter, the source of every transfer of weights.

A row gives a parameter's Megatron name (and its aliases in other layer specs), the names and shapes
of its Hugging Face tensors, their layout in the parameter, and the sharded dimension with its
group. ``docs/adding_a_family.md`` shows how to add rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from mppo.weights.blocks import Block, BlockKind, shard_blocks
from mppo.weights.shape import ModelShape

Where = Literal["embedding", "layer", "dense", "sparse", "expert", "final", "output", "value"]
Group = Literal["tp", "etp"]
Shape = tuple[int, ...]

LAYER = "decoder.layers.{l}."
HF_LAYER = "model.layers.{l}."
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


@dataclass(frozen=True)
class Entry:
    """A row at one layer and expert: one parameter of the model, before sharding.

    ``layer`` and ``expert`` are global indices from 0; None for rows outside layers or experts.
    """

    row: Row
    layer: int | None = None
    expert: int | None = None

    @cached_property
    def name(self) -> str:
        """Megatron name with global indices."""
        prefix = "" if self.layer is None else LAYER.format(l=self.layer)
        return prefix + self.row.name.replace("{e}", str(self.expert))

    @cached_property
    def hf(self) -> tuple[str, ...]:
        """Hugging Face names."""
        return tuple(name.format(l=self.layer, e=self.expert) for name in self.row.hf)

    @property
    def cut_dim(self) -> int:
        """The sharded dimension, 0 for replicated rows; blocks are intervals along it."""
        return self.row.dim or 0

    def blocks(self, rank: int, size: int, groups: int, padded: int = 0) -> tuple[Block, ...]:
        """Blocks of shard ``rank`` of ``size``.

        Args:
            rank: coordinate in the row's group; ignored for replicated rows.
            size: size of the row's group; ignored for replicated rows.
            groups: key-value heads.
            padded: padded vocabulary size, for ``vocab`` rows.
        """
        lengths = tuple(shape[self.cut_dim] for shape in self.row.shapes)
        if self.row.dim is None:
            rank, size = 0, 1
        return shard_blocks(self.row.kind, lengths, rank, size, groups, padded or lengths[0])

    def shard_shape(self, size: int, padded: int = 0) -> Shape:
        """Shape of one of ``size`` shards in Megatron."""
        dim, shapes = self.cut_dim, self.row.shapes
        total = padded if self.row.kind == "vocab" and padded else sum(s[dim] for s in shapes)
        cut = 1 if self.row.dim is None else size
        return (*shapes[0][:dim], total // cut, *shapes[0][dim + 1 :])


@dataclass(frozen=True)
class Table:
    """All rows of one model."""

    shape: ModelShape
    rows: tuple[Row, ...]
    _by_name: dict[str, Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = {alias: row for row in self.rows for alias in (row.name, *row.aliases)}
        object.__setattr__(self, "_by_name", names)

    def applies(self, row: Row, layer: int) -> bool:
        """Return whether decoder layer ``layer`` has the parameter ``row``."""
        sparse = self.shape.sparse_layers[layer]
        return {"layer": True, "dense": not sparse, "sparse": sparse, "expert": sparse}.get(
            row.where, False
        )

    def layer_entries(self, layer: int) -> Iterator[Entry]:
        """The parameters of one decoder layer."""
        for row in self.rows:
            if self.applies(row, layer):
                if row.where == "expert":
                    yield from (Entry(row, layer, e) for e in range(self.shape.num_experts))
                else:
                    yield Entry(row, layer)

    def entries(self) -> Iterator[Entry]:
        """Every parameter of a causal language model; each Hugging Face tensor appears once."""
        yield from (Entry(row) for row in self.rows if row.where == "embedding")
        for layer in range(self.shape.num_layers):
            yield from self.layer_entries(layer)
        ends = [row for row in self.rows if row.where in ("final", "output")]
        yield from (Entry(row) for row in ends if row.alias_of is None)

    def hf_shapes(self) -> dict[str, Shape]:
        """Shape of every Hugging Face tensor of the causal language model."""
        return {
            name: shape
            for entry in self.entries()
            for name, shape in zip(entry.hf, entry.row.shapes)
        }

    def value_entry(self) -> Entry:
        """The value head."""
        return next(Entry(row) for row in self.rows if row.where == "value")

    def find(self, name: str, layer: int | None, first_expert: int) -> Entry | None:
        """The entry of a parameter of a built stage.

        Args:
            name: Megatron name; inside a layer relative to the layer.
            layer: global index of the layer; None outside layers.
            first_expert: global index of this rank's first expert.

        Returns:
            The entry, or None if the table has no such parameter.
        """
        name, expert = _without_expert(name)
        row = self._by_name.get(name)
        if row is None or (row.where == "expert") != (expert is not None):
            return None
        if layer is None:
            return None if row.where in ("layer", "dense", "sparse", "expert") else Entry(row)
        if not self.applies(row, layer):
            return None
        return Entry(row, layer, None if expert is None else first_expert + expert)


_SEQUENTIAL = re.compile(r"^(mlp\.experts\.local_experts\.)(\d+)(\..*)$")
_GROUPED = re.compile(r"^(mlp\.experts\.linear_fc[12]\.weight)(\d+)()$")


def _without_expert(name: str) -> tuple[str, int | None]:
    """The name with its expert's index replaced by ``{e}``, and that index."""
    found = _SEQUENTIAL.match(name) or _GROUPED.match(name)
    if found is None:
        return name, None
    return f"{found[1]}{{e}}{found[3]}", int(found[2])


def parameter_table(shape: ModelShape) -> Table:
    """The table of a model.

    Args:
        shape: the model's sizes, from ``mppo.weights.shape.model_shape``.
    """
    rows = _ends(shape) + _norms(shape)
    rows += _mla_attention(shape) if shape.mla else _attention(shape)
    rows += _feed_forward("mlp.", "mlp.", shape.ffn, shape, "dense")
    if any(shape.sparse_layers):
        rows += _experts(shape)
    return Table(shape, tuple(rows))


def _ends(shape: ModelShape) -> list[Row]:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    vocab = ((shape.vocab, shape.hidden),)
    return [
        Row(_EMBEDDING, (embed,), vocab, "vocab", 0, "embedding"),
        Row(
            "decoder.final_layernorm.weight", ("model.norm.weight",), ((shape.hidden,),),
            where="final",
        ),
        Row(
            "output_layer.weight", (embed if shape.tied else head,), vocab, "vocab", 0, "output",
            alias_of=_EMBEDDING if shape.tied else None,
        ),
        Row(
            "value_head.weight", ("score.weight",), ((1, shape.hidden),), where="value",
            optional=True,
        ),
    ]  # fmt: skip


def _norms(shape: ModelShape) -> list[Row]:
    def norm(name: str, hf: str, *aliases: str, where: Where = "layer") -> Row:
        return Row(
            f"{name}.weight", (f"{HF_LAYER}{hf}.weight",), ((shape.hidden,),), where=where,
            aliases=tuple(f"{alias}weight" for alias in aliases),
        )  # fmt: skip

    fused = () if shape.mla else ("self_attention.linear_qkv.layer_norm_",)
    before_mlp = "pre_feedforward_layernorm" if shape.sandwich_norms else "post_attention_layernorm"
    rows = [
        norm("input_layernorm", "input_layernorm", *fused),
        norm("pre_mlp_layernorm", before_mlp, "mlp.linear_fc1.layer_norm_"),
    ]
    if shape.sandwich_norms:
        rows += [
            norm(
                "post_attention_layernorm", "post_attention_layernorm",
                "self_attention.linear_proj.post_layernorm.",
            ),
            norm(
                "post_mlp_layernorm", "post_feedforward_layernorm",
                "mlp.linear_fc2.post_layernorm.",
            ),
        ]  # fmt: skip
    return rows


def _attention(shape: ModelShape) -> list[Row]:
    own, hf = "self_attention.", f"{HF_LAYER}self_attn."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names = tuple(f"{hf}{x}_proj.weight" for x in "qkv")
    widths = (queries, keys, keys)
    rows = [
        Row(
            f"{own}linear_qkv.weight", names, tuple((width, shape.hidden) for width in widths),
            "qkv", 0, fuse_group="qkv",
        ),
        Row(
            f"{own}linear_proj.weight", (f"{hf}o_proj.weight",), ((shape.hidden, queries),), dim=1
        ),
    ]  # fmt: skip
    if shape.qkv_bias:
        names = tuple(f"{hf}{x}_proj.bias" for x in "qkv")
        shapes = tuple((width,) for width in widths)
        rows.append(Row(f"{own}linear_qkv.bias", names, shapes, "qkv", 0, fuse_group="qkv"))
    if shape.qk_norm:
        rows += [
            Row(f"{own}{x}_layernorm.weight", (f"{hf}{x}_norm.weight",), ((shape.head_dim,),))
            for x in "qk"
        ]
    return rows


def _mla_attention(shape: ModelShape) -> list[Row]:
    mla, own, hf = shape.mla, "self_attention.", f"{HF_LAYER}self_attn."
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
    own: str, of: str, width: int, shape: ModelShape, where: Where,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Row]:  # fmt: skip
    gate, up, down = (f"{HF_LAYER}{of}{name}.weight" for name in names)
    wide, narrow = (width, shape.hidden), (shape.hidden, width)
    group: Group = "etp" if where == "expert" else "tp"
    rows = [
        Row(f"{own}linear_fc1.weight", (gate, up), (wide, wide), "gated", 0, where, group),
        Row(f"{own}linear_fc2.weight", (down,), (narrow,), dim=1, where=where, group=group),
    ]
    if where == "expert":
        rows = [replace(row, aliases=(_grouped_name(row.name),)) for row in rows]
    return rows


def _grouped_name(name: str) -> str:
    """Name of an expert's weight inside a grouped linear layer."""
    return f"mlp.experts.{name.removeprefix('mlp.experts.local_experts.{e}.')}{{e}}"


def _experts(shape: ModelShape) -> list[Row]:
    mixtral = shape.model_type == "mixtral"
    block = "block_sparse_moe." if mixtral else "mlp."
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    count = shape.num_experts
    rows = [
        Row(
            "mlp.router.weight", (f"{HF_LAYER}{block}gate.weight",), ((count, shape.hidden),),
            where="sparse",
        ),
        *_feed_forward(
            "mlp.experts.local_experts.{e}.", f"{block}experts.{{e}}.", shape.expert_ffn, shape,
            "expert", names,
        ),
    ]  # fmt: skip
    if shape.expert_bias:
        rows.append(
            Row(
                "mlp.router.expert_bias", (f"{HF_LAYER}mlp.gate.e_score_correction_bias",),
                ((count,),), where="sparse", keep_fp32=True,
            )
        )  # fmt: skip
    if shape.shared_ffn:
        of = "mlp.shared_experts." if shape.mla else "mlp.shared_expert."
        rows += _feed_forward("mlp.shared_experts.", of, shape.shared_ffn, shape, "sparse")
    if shape.shared_gate:
        rows.append(
            Row(
                "mlp.shared_experts.gate_weight", (f"{HF_LAYER}mlp.shared_expert_gate.weight",),
                ((1, shape.hidden),), where="sparse",
            )
        )  # fmt: skip
    return rows
