"""Every family with changed settings of its function: attention, norms and
activation. One table for all programs that compute these models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from hf_families import BASE, EXPERTS, LATENT, LLAMA3, PLAIN, TIED, YARN, randomise


@dataclass(frozen=True)
class Variant:
    """A tiny model.

    Args:
        config: transformers' class of its config.
        fixed: sizes and whatever else it needs.
        varied: settings away from their defaults; each changes what the model computes.
        corrected: transformers itself ignores some of ``varied``: what its code and the code
            published with the family's weights disagree on.
    """

    config: type
    fixed: dict[str, Any]
    varied: dict[str, Any] = field(default_factory=dict)
    corrected: bool = False

    def settings(self, without: str | None = None) -> Any:
        """Its config; ``without`` one of the varied settings."""
        varied = {key: value for key, value in self.varied.items() if key != without}
        return self.config(**{**self.fixed, **varied})


WINDOW = 7
LINEAR = {"rope_theta": 1e3, "rope_type": "linear", "factor": 2.0}
LONG = {**BASE, "max_position_embeddings": 131072}
HEADS = {**BASE, "head_dim": 32}
GEMMA = {**TIED, "head_dim": 32}
MIXTRAL = {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = {**BASE, **EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
QWEN3_MOE = {**HEADS, **EXPERTS}
DEEPSEEK = {
    **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": None,
}  # fmt: skip
V2 = {**DEEPSEEK, "topk_method": "greedy", "norm_topk_prob": False}
V3 = {**DEEPSEEK, "norm_topk_prob": True}
EPS = {"rms_norm_eps": 1e-2}
PER_LAYER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}


def yarn(**settings: Any) -> dict[str, Any]:
    """YaRN that stretches few enough positions for short sequences to show it."""
    return {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 64, **settings}


VARIANTS = {
    "llama linear": Variant(
        hf.LlamaConfig, BASE, {**EPS, "rope_parameters": LINEAR, "hidden_act": "gelu"}
    ),
    "llama llama3": Variant(
        hf.LlamaConfig, LONG, {"rope_parameters": LLAMA3, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "llama yarn, stated factor": Variant(
        hf.LlamaConfig, BASE, {"rope_parameters": yarn(attention_factor=1.5)}
    ),
    "mistral": Variant(
        hf.MistralConfig, BASE,
        {**EPS, "sliding_window": WINDOW, "rope_parameters": LINEAR, "hidden_act": "gelu"},
    ),
    "qwen2 all layers": Variant(
        hf.Qwen2Config, {**BASE, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen2 some layers": Variant(
        hf.Qwen2Config, TIED, {**EPS, **PER_LAYER, "rope_parameters": yarn()}
    ),
    "qwen3 some layers": Variant(
        hf.Qwen3Config, HEADS,
        {**EPS, **PER_LAYER, "rope_parameters": yarn(mscale=1.2, mscale_all_dim=0.6)},
    ),
    "gemma": Variant(
        hf.GemmaConfig, GEMMA, {**EPS, "rope_parameters": LINEAR, "hidden_act": "silu"}
    ),
    "gemma gelu": Variant(hf.GemmaConfig, {**GEMMA, "hidden_act": "gelu"}, EPS, corrected=True),
    "gemma2": Variant(
        hf.Gemma2Config, {**GEMMA, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {
            **EPS, **CAPS, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
            "rope_parameters": LINEAR, "hidden_activation": "gelu",
        },
    ),
    "gemma2 without caps": Variant(
        hf.Gemma2Config, {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"sliding_window": WINDOW},
    ),
    "gpt_neox": Variant(
        hf.GPTNeoXConfig, {**PLAIN, "intermediate_size": 96, "tie_word_embeddings": True},
        {
            "layer_norm_eps": 1e-2, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5},
            "hidden_act": "gelu_new",
        },
    ),
    "gpt_neox in sequence": Variant(
        hf.GPTNeoXConfig, {**PLAIN, "intermediate_size": 96},
        {"use_parallel_residual": False, "rope_parameters": {"partial_rotary_factor": 1.0}},
    ),
    "opt": Variant(hf.OPTConfig, {**PLAIN, "ffn_dim": 96}, {"activation_function": "gelu"}),
    "glm4": Variant(
        hf.Glm4Config, {**HEADS, "pad_token_id": None, "attention_bias": False},
        {
            **EPS, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25},
            "hidden_act": "gelu",
        },
    ),
    "mixtral": Variant(
        hf.MixtralConfig, MIXTRAL,
        {**EPS, "sliding_window": WINDOW, "rope_parameters": yarn(), "hidden_act": "gelu"},
    ),
    "qwen2_moe": Variant(
        hf.Qwen2MoeConfig, {**QWEN2_MOE, "norm_topk_prob": False},
        {**EPS, **PER_LAYER, "rope_parameters": LINEAR, "hidden_act": "gelu"},
    ),
    "qwen3_moe": Variant(
        hf.Qwen3MoeConfig, {**QWEN3_MOE, "use_sliding_window": True},
        {**EPS, "sliding_window": WINDOW, "rope_parameters": yarn(), "norm_topk_prob": True},
    ),
    "glm4_moe": Variant(
        hf.Glm4MoeConfig,
        {
            **HEADS, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 4,
            "n_shared_experts": 2, "n_group": 4, "use_qk_norm": True, "attention_bias": True,
        },
        {
            **EPS, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25},
            "hidden_act": "gelu", "routed_scaling_factor": 2.5, "topk_group": 2,
        },
    ),
    "deepseek_v2": Variant(
        hf.DeepseekV2Config, V2,
        {
            **EPS, "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
            "hidden_act": "gelu", "routed_scaling_factor": 1.5,
        },
        corrected=True,
    ),
    "deepseek_v2 two mscales": Variant(
        hf.DeepseekV2Config, {**V2, "q_lora_rank": 24},
        {"rope_parameters": yarn(mscale=1.2, mscale_all_dim=0.6)}, corrected=True,
    ),
    "deepseek_v2 no mscale": Variant(
        hf.DeepseekV2Config, V2, {**EPS, "rope_parameters": yarn()}
    ),
    "moonlight": Variant(
        hf.DeepseekV3Config, V3, {**EPS, "hidden_act": "gelu", "routed_scaling_factor": 2.446}
    ),
    "deepseek_v3": Variant(
        hf.DeepseekV3Config, {**V3, "q_lora_rank": 24},
        {**EPS, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)},
    ),
    "deepseek_v3 two mscales": Variant(
        hf.DeepseekV3Config, V3, {"rope_parameters": yarn(mscale=1.2, mscale_all_dim=0.6)}
    ),
    "glm4_moe_lite": Variant(
        hf.Glm4MoeLiteConfig,
        {**V3, "q_lora_rank": 24, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
        {
            **EPS, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0), "hidden_act": "gelu",
            "routed_scaling_factor": 2.5,
        },
    ),
    "seed_oss": Variant(
        hf.SeedOssConfig, {**HEADS, "pad_token_id": None},
        {**EPS, "rope_parameters": yarn(), "hidden_act": "gelu"},
    ),
    "smollm3": Variant(
        hf.SmolLM3Config, {**TIED, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
        {**EPS, "no_rope_layers": [0, 1, 1, 0], "rope_parameters": yarn(), "hidden_act": "gelu"},
    ),
    "smollm3 windows": Variant(
        hf.SmolLM3Config,
        {
            **TIED, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
            "use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0],
        },
        {"sliding_window": WINDOW},
    ),
}  # fmt: skip


def save_variant(name: str, folder: Path) -> Path:
    """Save the variant as a Hugging Face folder."""
    variant = VARIANTS[name]
    model = hf.AutoModelForCausalLM.from_config(variant.settings(), dtype=torch.float32)
    randomise(model, name.startswith("gemma"))
    model.save_pretrained(folder)
    return folder
