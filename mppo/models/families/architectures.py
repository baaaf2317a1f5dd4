"""Megatron's configuration of a Hugging Face model, one function per family.

Settings that Megatron cannot represent exactly are refused with key, value, reason and fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mppo import register
from mppo.models.families.family import FamilyConfig, family_of
from mppo.models.families.rope import mla_rope, plain_rope
from mppo.recipe.model_shape import QKV_BIAS_KEYS, ModelShape, model_shape, refuse
from mppo.safety.input_error import InputError

MLA_NORM_EPSILON = 1e-6
"""Epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``, independent of ``rms_norm_eps``, which is
that of all other norms. The published code of DeepSeek-V2, V3 and Moonlight
(``modeling_deepseek.py`` beside the weights) constructs these two without an epsilon, so they have
the default. Transformers does the same; Megatron-LM and serving engines use ``rms_norm_eps``."""


def family_config(hf_config: Any) -> FamilyConfig:
    """Translate a Hugging Face config into an architecture; ValueError for an unknown family, or a
    setting Megatron cannot represent exactly."""
    shape = model_shape(hf_config)
    _check_biases(hf_config, shape)
    _check_quantization(hf_config)
    family = register.family[shape.model_type](hf_config, shape)
    if not isinstance(family, FamilyConfig):
        raise InputError(
            f"the model family {shape.model_type!r} returned {type(family).__name__}; return a "
            "FamilyConfig, such as llama(hf_config, shape) of mppo.models.families.architectures"
        )
    return family


def llama(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Llama 1 to 3, deepseek-llm, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3: dense, grouped heads."""
    rope_kwargs, attributes = plain_rope(hf_config)
    windows = _layer_windows(hf_config, shape)
    attention: dict[str, Any] = {
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
    }
    if size := max((window or 0 for window in windows), default=0):
        attention["window_size"] = (size - 1, 0)  # keys left and right of a query
        attention["window_attn_skip_freq"] = [int(window is not None) for window in windows]
    return family_of(
        hf_config,
        shape,
        transformer_kwargs=attention,
        gpt_kwargs=rope_kwargs,
        config_attributes=attributes,
        layer_windows=windows,
    )


def gemma(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Gemma (1): ``1 + weight`` norms, scaled embeddings, tanh GELU."""
    if getattr(hf_config, "use_bidirectional_attention", None):
        raise refuse(
            "use_bidirectional_attention", True, "a policy needs causal attention",
            "use a causal checkpoint",
        )  # fmt: skip
    return replace(
        llama(hf_config, shape),
        embedding_scale=math.sqrt(shape.hidden),
        zero_centered_norm=True,
    )


def gemma2(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Gemma 2: Gemma with four norms per layer, soft-capped scores and logits, own query scale."""
    family = gemma(hf_config, shape)
    softcap = getattr(hf_config, "attn_logit_softcapping", None)
    scalar = getattr(hf_config, "query_pre_attn_scalar", None) or shape.head_dim
    return replace(
        family,
        transformer_kwargs=family.transformer_kwargs | {"softmax_scale": scalar**-0.5},
        sandwich_norms=True,
        final_logit_softcap=getattr(hf_config, "final_logit_softcapping", None),
        attn_logit_softcap=softcap,
    )


def mixtral(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Mixtral: Llama attention, softmax over the chosen experts."""
    return _with_experts(llama(hf_config, shape), hf_config, shape, renormalised=True)


def qwen_moe(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Qwen2-MoE (gated shared expert) and Qwen3-MoE."""
    renormalised = bool(getattr(hf_config, "norm_topk_prob", False))
    return _with_experts(llama(hf_config, shape), hf_config, shape, renormalised)


def gpt_neox(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """GPT-NeoX and Pythia: parallel residual, partly rotated heads."""
    parallel = bool(getattr(hf_config, "use_parallel_residual", True))
    return replace(llama(hf_config, shape), parallel_residual=parallel)


def opt(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """OPT, except 350m: learned positions, ReLU."""
    usual = {
        "do_layer_norm_before": (True, "normalises after each residual sum"),
        "word_embed_proj_dim": (shape.hidden, f"projects embeddings to width {shape.hidden}"),
        "layer_norm_elementwise_affine": (True, "has norms without weights"),
        "_remove_final_layer_norm": (False, "has no norm after the last layer"),
    }
    for key, (supported, how) in usual.items():
        value = getattr(hf_config, key, supported)
        if value != supported:
            raise refuse(
                key, value, f"the model {how}, Megatron's does not",
                "use another size of OPT (of the published ones, only 350m is refused)",
            )  # fmt: skip
    return llama(hf_config, shape)


def glm4(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """GLM-4 (0414): four norms per layer, partly rotated heads in interleaved pairs."""
    family = llama(hf_config, shape)
    kwargs = family.transformer_kwargs | {"rotary_interleaved": True}
    return replace(family, sandwich_norms=True, transformer_kwargs=kwargs)


def glm4_moe(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """GLM-4.5 and 4.6: partly rotated heads, DeepSeek-V3's mixture of experts."""
    return _with_sigmoid_router(llama(hf_config, shape), hf_config, shape)


def seed_oss(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """Seed-OSS: Qwen2 with heads of their own width."""
    if not shape.qkv_bias:
        raise refuse(
            "attention_bias", False, "the released models have biases of queries, keys and values, "
            "which SGLang's layers always add", "use a checkpoint with them",
        )  # fmt: skip
    return llama(hf_config, shape)


def smollm3(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """SmolLM3: Llama, in which some layers do not rotate queries and keys."""
    rotated = list(hf_config.no_rope_layers)
    if len(rotated) != shape.num_layers:
        raise refuse(
            "no_rope_layers", rotated, f"must have one entry for each of {shape.num_layers} layers",
            "give 1 for layers with rotary positions, else 0",
        )  # fmt: skip
    family = llama(hf_config, shape)
    kwargs = family.transformer_kwargs | {"no_rope_freq": [int(not layer) for layer in rotated]}
    return replace(family, transformer_kwargs=kwargs)


def deepseek_v2(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """DeepSeek-V2 and V2-Lite: MLA, softmax router without groups."""
    method = getattr(hf_config, "topk_method", None) or "greedy"
    if method != "greedy" and (getattr(hf_config, "n_group", None) or 1) > 1:
        raise refuse(
            "topk_method", method,
            "the model ranks groups by their best expert, Megatron by a sum, which selects other "
            "experts",
            "use a checkpoint with topk_method greedy (DeepSeek-V2-Lite)",
        )  # fmt: skip
    if getattr(hf_config, "norm_topk_prob", False):
        raise refuse(
            "norm_topk_prob", True, "transformers ignores it for DeepSeek-V2, other engines do not",
            "set it to false",
        )  # fmt: skip
    family = _mla(hf_config, shape)
    if not any(shape.sparse_layers):
        return family
    family = _with_experts(family, hf_config, shape, renormalised=False)
    scale = {"moe_router_topk_scaling_factor": float(hf_config.routed_scaling_factor)}
    return replace(family, transformer_kwargs=family.transformer_kwargs | scale)


def deepseek_v3(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    """DeepSeek-V3, R1, Moonlight, GLM-4.7-Flash: MLA, sigmoid router with expert bias."""
    return _with_sigmoid_router(_mla(hf_config, shape), hf_config, shape)


def _with_sigmoid_router(family: FamilyConfig, hf_config: Any, shape: ModelShape) -> FamilyConfig:
    if not any(shape.sparse_layers):
        return family
    chosen = hf_config.num_experts_per_tok
    renormalised = bool(getattr(hf_config, "norm_topk_prob", True))
    if renormalised != (chosen > 1):
        raise refuse(
            "norm_topk_prob", renormalised,
            f"Megatron's sigmoid router renormalises the weights if and only if "
            f"num_experts_per_tok > 1, and it is {chosen}",
            f"set it to {str(chosen > 1).lower()}",
        )  # fmt: skip
    scoring = getattr(hf_config, "scoring_func", None) or "sigmoid"
    if scoring != "sigmoid":
        raise refuse("scoring_func", scoring, "this family routes by sigmoid", "set it to sigmoid")
    router: dict[str, Any] = {
        "moe_router_topk_scaling_factor": float(hf_config.routed_scaling_factor),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    groups = getattr(hf_config, "n_group", None) or 1
    if groups > 1:
        if chosen // hf_config.topk_group != 2:
            raise refuse(
                "topk_group", hf_config.topk_group,
                f"the model ranks groups by the sum of their best 2 experts, Megatron by their "
                f"best num_experts_per_tok // topk_group = {chosen // hf_config.topk_group}",
                f"use a checkpoint with topk_group = {chosen // 2}",
            )  # fmt: skip
        router |= {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": hf_config.topk_group,
        }
    family = _with_experts(family, hf_config, shape, renormalised=False)
    return replace(family, transformer_kwargs=family.transformer_kwargs | router)


Builder = Callable[[Any, ModelShape], FamilyConfig]
"""From a transformers config and the sizes read from it to the architecture."""
_OWN: dict[str, Builder] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "gemma": gemma,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "qwen2_moe": qwen_moe,
    "qwen3_moe": qwen_moe,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": deepseek_v3,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}
register.family.fill(_OWN)


def _mla(hf_config: Any, shape: ModelShape) -> FamilyConfig:
    mla = shape.mla
    assert mla is not None
    if not getattr(hf_config, "rope_interleave", True):
        raise refuse(
            "rope_interleave", False, "Megatron's MLA rotates interleaved pairs",
            "use the family's usual layout",
        )  # fmt: skip
    return family_of(
        hf_config,
        shape,
        transformer_kwargs={
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_head_dim": mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
            "qk_layernorm": True,
        }
        | mla_rope(hf_config),
        mla_norm_epsilon=MLA_NORM_EPSILON,
    )


def _with_experts(
    family: FamilyConfig, hf_config: Any, shape: ModelShape, renormalised: bool
) -> FamilyConfig:
    """The family with feed-forward layers turned into mixtures of experts; ``renormalised``: the
    weights of the chosen experts sum to one (softmax after the choice)."""
    if not any(shape.sparse_layers):
        return family
    chosen = hf_config.num_experts_per_tok
    if not chosen:
        raise refuse(
            "num_experts_per_tok", chosen, "a mixture of experts needs at least 1", "set it"
        )
    if chosen > shape.num_experts:
        raise refuse(
            "num_experts_per_tok", chosen, f"there are only {shape.num_experts} experts", "lower it"
        )
    if renormalised and chosen == 1:
        raise refuse(
            "num_experts_per_tok", 1,
            "a single renormalised weight is always 1; Megatron does not renormalise it",
            "use a checkpoint that chooses at least 2 experts",
        )  # fmt: skip
    kwargs: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
        "moe_layer_freq": [int(sparse) for sparse in shape.sparse_layers],
    }
    if shape.shared_ffn:
        kwargs["moe_shared_expert_intermediate_size"] = shape.shared_ffn
        kwargs["moe_shared_expert_gate"] = shape.shared_gate
    return replace(family, transformer_kwargs=family.transformer_kwargs | kwargs)


def _layer_windows(hf_config: Any, shape: ModelShape) -> tuple[int | None, ...]:
    size = getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None)
    unused = getattr(hf_config, "use_sliding_window", True) is False
    if not size or unused or shape.like in ("llama", "gemma"):
        return (None,) * shape.num_layers
    if shape.like in ("mistral", "mixtral", "qwen3_moe"):
        return (int(size),) * shape.num_layers
    kinds = list(kinds or ["full_attention"] * shape.num_layers)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != shape.num_layers:
        raise refuse(
            "layer_types", kinds, "must have one supported attention type per layer",
            "use full_attention or sliding_attention for each layer",
        )  # fmt: skip
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


def _check_biases(hf_config: Any, shape: ModelShape) -> None:
    """Refuse biases in some layers only: Megatron has them in all linear layers, or in queries,
    keys and values."""
    if shape.biases:
        for key in ("attention_bias", "enable_bias"):
            if getattr(hf_config, key, True) is False:
                raise refuse(
                    key, False, "Megatron has biases in all linear layers of this family",
                    "use a checkpoint with them",
                )  # fmt: skip
        return
    for key in ("attention_bias", "attention_out_bias", "mlp_bias"):
        own = ("attention_bias",) if shape.like == "qwen2" else ()
        if key in QKV_BIAS_KEYS.get(shape.like, own):
            continue  # the family has these for queries, keys and values only
        if getattr(hf_config, key, False):
            raise refuse(
                key, True,
                "biases of the output projection and the feed-forward layer are not supported",
                "use a checkpoint without them",
            )  # fmt: skip


def _check_quantization(hf_config: Any) -> None:
    stated = getattr(hf_config, "quantization_config", None)
    if stated is None:
        return
    settings = stated if isinstance(stated, dict) else stated.to_dict()
    if settings.get("quant_method") != "fp8" or not settings.get("weight_block_size"):
        raise refuse(
            "quantization_config", settings, "only fp8 with weight_block_size is dequantised",
            "use the unquantised checkpoint",
        )  # fmt: skip
