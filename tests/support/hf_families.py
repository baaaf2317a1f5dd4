"""Tiny random models of every family and variant, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors import safe_open

VOCAB = 117
BASE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**BASE, "tie_word_embeddings": True}
LATENT = {
    **BASE, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}

PLAIN = {
    key: BASE[key]
    for key in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "max_position_embeddings",
    )
}  # fmt: skip
"""Of the families with LayerNorm, biases and an ungated feed-forward."""

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**BASE),
    "llama_mha": lambda: hf.LlamaConfig(**{**BASE, "num_key_value_heads": 4}),
    "llama3_rope": lambda: hf.LlamaConfig(
        **{**BASE, "max_position_embeddings": 131072}, rope_parameters=LLAMA3
    ),
    "llama_linear": lambda: hf.LlamaConfig(
        **BASE, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    ),
    "mistral": lambda: hf.MistralConfig(**BASE, sliding_window=7),
    "qwen2": lambda: hf.Qwen2Config(**BASE),
    "qwen2_tied": lambda: hf.Qwen2Config(**TIED),
    "qwen2_yarn": lambda: hf.Qwen2Config(**BASE, rope_parameters=YARN),
    "qwen2_window": lambda: hf.Qwen2Config(
        **BASE, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "qwen3": lambda: hf.Qwen3Config(**BASE, head_dim=32),
    "gemma": lambda: hf.GemmaConfig(**TIED, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(
        **TIED, head_dim=32, query_pre_attn_scalar=24, sliding_window=8,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**PLAIN, intermediate_size=96),
    "opt": lambda: hf.OPTConfig(**PLAIN, ffn_dim=96),
    "glm4": lambda: hf.Glm4Config(**BASE, head_dim=16, pad_token_id=None),
    "mixtral": lambda: hf.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **BASE, **EXPERTS, shared_expert_intermediate_size=48, norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**BASE, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**BASE, "rms_norm_eps": 1e-5}, head_dim=16, moe_intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=2, routed_scaling_factor=1.5, use_qk_norm=True,
        attention_bias=True,
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2,
        n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.5,
        norm_topk_prob=False, rope_parameters=LATENT_YARN,
    ),
    "moonlight": lambda: hf.DeepseekV3Config(
        **{**LATENT, "rms_norm_eps": 1e-5}, q_lora_rank=None, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=2, n_group=1, topk_group=1,
        routed_scaling_factor=2.446, norm_topk_prob=True,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **LATENT, q_lora_rank=24, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        rope_parameters=LATENT_YARN,
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **{**LATENT, "rms_norm_eps": 1e-5}, q_lora_rank=24, n_routed_experts=8,
        num_experts_per_tok=2, routed_scaling_factor=1.8,
    ),
    "seed_oss": lambda: hf.SeedOssConfig(**BASE, head_dim=32, pad_token_id=None),
    "smollm3": lambda: hf.SmolLM3Config(
        **TIED, no_rope_layers=[1, 0, 1, 1], pad_token_id=None, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


def randomise(model: torch.nn.Module, zero_centred: bool) -> None:
    """Set weights, norms and biases to seeded values that are not neutral."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and not zero_centred and "bias" not in name else 0
            parameter.normal_(centre, 0.2 if parameter.dim() == 1 else 0.08)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Save the model ``name`` in several safetensors files, with a stand-in tokenizer file."""
    settings = CONFIGS[name]()
    for key, value in config.items():
        setattr(settings, key, value)
    model = hf.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    randomise(model, name.startswith("gemma"))
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            found.update({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
    return found


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Check for equal names, dtypes and bytes."""
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def save_reward_model(name: str, folder: Path, **config: Any) -> Path:
    """Save a reward model of the family ``name``: one label, without padding token."""
    settings = CONFIGS[name]()
    for key, value in {"num_labels": 1, "pad_token_id": None, **config}.items():
        setattr(settings, key, value)
    model = hf.AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    randomise(model, name.startswith("gemma"))
    model.save_pretrained(folder)
    return folder
