"""Small random models of each family, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

_SIZE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LEARNED = {**_SIZE, "ffn_dim": _SIZE["intermediate_size"], "tie_word_embeddings": True}
del _LEARNED["intermediate_size"]
_GROUPED = {**_SIZE, "num_key_value_heads": 2}
_NINE = {
    **_SIZE,
    "hidden_size": 36,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
_SPARSE = {
    **_GROUPED,
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
_LATENT = {
    **_SIZE,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}

CONFIGS = {
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen2_tied": lambda: hf.Qwen2Config(**{**_GROUPED, "tie_word_embeddings": True}),
    "qwen2_wide": lambda: hf.Qwen2Config(
        **{**_GROUPED, "vocab_size": 4096, "tie_word_embeddings": True}
    ),
    "qwen2_shallow": lambda: hf.Qwen2Config(**{**_GROUPED, "num_hidden_layers": 2}),
    "qwen2_tied_shallow": lambda: hf.Qwen2Config(
        **{**_GROUPED, "tie_word_embeddings": True, "num_hidden_layers": 2}
    ),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "llama_of_9_heads": lambda: hf.LlamaConfig(**_NINE),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=12),
    "mistral_window": lambda: hf.MistralConfig(**_GROUPED, sliding_window=5),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZE),
    "opt": lambda: hf.OPTConfig(**_LEARNED, pad_token_id=None),
    "gemma2": lambda: hf.Gemma2Config(
        **{**_GROUPED, "tie_word_embeddings": True},
        head_dim=8,
        sliding_window=6,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **_GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SPARSE),
    "qwen3_moe_shallow": lambda: hf.Qwen3MoeConfig(**{**_SPARSE, "num_hidden_layers": 2}),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "moonlight": lambda: hf.DeepseekV3Config(**_LATENT),
}
"""A config for each name; "qwen2_wide" has a vocabulary of many times its width, "llama_of_9_heads"
the heads of SmolLM2-135M; "moonlight" has Moonlight's shape: MLA, a dense first layer,
shared experts, sigmoid router with an expert bias."""


def save(name: str, folder: Path) -> None:
    """Write a model with seeded weights, norms and biases away from their neutral values."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                centre = 0.0 if "bias" in parameter_name or name == "gemma2" else 1.0
                parameter.normal_(centre, 0.2)
        for buffer_name, buffer in model.named_buffers():
            if "e_score_correction_bias" in buffer_name:
                buffer.normal_(0.0, 0.05)
    model.save_pretrained(folder)
