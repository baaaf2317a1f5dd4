"""Families that users ask for and mppo does not compute, each with the reason.

What Megatron-Core lacks was read in its version 0.16.1, what a family needs in transformers 5.12.1.
"""

from __future__ import annotations

_DELTA_NET = (
    "three of four layers are gated delta nets, which Megatron-Core refuses for packed sequences "
    "(ssm/gated_delta_net.py: NotImplementedError)"
)
_INDEXER = (
    "an indexer selects the keys of its attention, which Megatron-Core refuses for packed "
    "sequences (experimental_attention_variant/dsa.py)"
)
_TWO_ROPES = (
    "layers with and without a window rotate with different bases, and Megatron-Core has one for "
    "all layers"
)
_WHOLE_NORMS = (
    "it norms queries and keys over all heads together, and Megatron-Core each head by itself"
)
_SCALED_QUERIES = (
    "queries are scaled by their position (llama_4_scaling_beta), which Megatron-Core does not do"
)

DIFFERENT: dict[str, str] = {
    "gpt_oss": "its attention has a learned sink per head, its experts have biases, a clamped "
    "activation and gate and up row by row in one tensor of all experts; the attention and the "
    "weight table of mppo have none of these",
    "qwen3_next": _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "gemma3": _TWO_ROPES,
    "gemma3_text": _TWO_ROPES,
    "olmo2": _WHOLE_NORMS,
    "olmo3": _WHOLE_NORMS,
    "ministral3": _SCALED_QUERIES,
    "mistral3": _SCALED_QUERIES,
    "phi3": "one tensor holds all queries, then all keys, then all values, an order that the "
    "weight table of mppo does not have",
}
"""Reason by ``model_type``."""

RENAMED: dict[str, tuple[str, str]] = {
    "kimi_k2": ("deepseek_v3", "Kimi-K2's layers and tensors are DeepSeek-V3's"),
    "mimo": ("qwen2", "MiMo-7B's layers and tensors are Qwen2's"),
}
"""The family that computes the same, and why, by a ``model_type`` that transformers lacks."""
