"""The names of a family's tensors in Hugging Face checkpoints.

Names end before ``.weight`` and ``.bias``; names inside a layer follow ``layer``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mppo import register


@dataclass(frozen=True)
class HFNames:
    """Names of a family's parameters; the defaults are Llama's and DeepSeek-V3's.

    Args:
        positions: learned embeddings of the positions; empty: the family has none.
        layer: prefix of a layer, with ``{l}`` for its index.
        attention_post_norm, mlp_post_norm: norms of what each half of a layer adds to the residual;
            empty: the family has none.
        qkv: projections to queries, keys and values; or one for all three, whose rows are ordered
            by head, and within a head as queries, keys and values.
        mlp_in: gate and up projection, one for both (its first half is the gate), or the only
            input projection of an ungated feed-forward.
        mixture: prefix of a mixture of experts.
        expert: gate, up and output projection of an expert.
        shared: shared experts, inside the mixture.
        buffers: tensors of a layer that old checkpoints hold although the model computes them.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{l}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    mixture: str = "mlp."
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    buffers: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)


_LLAMA = HFNames()
_OTHERS = {
    "gemma2": HFNames(
        mlp_norm="pre_feedforward_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    "glm4": HFNames(
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        mlp_in=("mlp.gate_up_proj",),
    ),
    "mixtral": HFNames(mixture="block_sparse_moe.", expert=("w1", "w3", "w2")),
    "qwen2_moe": HFNames(shared="shared_expert"),
    "gpt_neox": HFNames(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{l}.",
        qkv=("attention.query_key_value",),
        attention_out="attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        buffers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    ),
    "opt": HFNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{l}.",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        attention_out="self_attn.out_proj",
        mlp_in=("fc1",),
        mlp_out="fc2",
        buffers=(),
    ),
}


def hf_names(model_type: str) -> HFNames:
    traits = register.family.traits(model_type)
    return traits.names or _OTHERS.get(traits.like, _LLAMA)
