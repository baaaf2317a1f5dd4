"""Checks of a model's ``config.json`` before a library builds a configuration from it.

Configuration classes allocate lists of ``num_hidden_layers`` entries and accept any value as a
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.recipe.model_shape import RENAMED, VALUE_BINS, check_model_type, refuse
from mppo.safety.input_error import InputError
from mppo.safety.input_files import check_regular_files, read_json

CONFIG, GENERATION = "config.json", "generation_config.json"

_LAYERS, _HEADS, _EXPERTS = 1 << 10, 1 << 12, 1 << 13
_WIDTH, _LONG, _TOKENS = 1 << 20, 1 << 24, 1 << 30
_KEYS_BY_SIZE = {
    (1, _LAYERS): ("num_hidden_layers",),
    (0, _LAYERS): (
        "first_k_dense_replace", "num_nextn_predict_layers", "decoder_sparse_step",
        "moe_layer_freq",
    ),
    (1, _WIDTH): (
        "hidden_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim",
        "moe_intermediate_size", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    ),
    (0, _WIDTH): ("shared_expert_intermediate_size",),
    (1, _HEADS): ("num_attention_heads", "num_key_value_heads", VALUE_BINS),
    (0, _EXPERTS): (
        "num_experts", "n_routed_experts", "num_local_experts", "n_shared_experts",
        "num_experts_per_tok", "n_group", "topk_group",
    ),
    (1, _LONG): ("vocab_size",),
    (1, _TOKENS): ("max_position_embeddings",),
    (0, _TOKENS): ("max_window_layers", "sliding_window"),
}  # fmt: skip
SIZES = {key: limits for limits, keys in _KEYS_BY_SIZE.items() for key in keys}
"""Least and most value of every size, an integer; the limits are far beyond existing models. Each
family checks for itself where null is valid."""

NUMBERS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "rope_theta": (1.0, 1e15),
    "rotary_emb_base": (1.0, 1e15),
    "rotary_pct": (0.0, 1.0),
    "partial_rotary_factor": (0.0, 1.0),
    "routed_scaling_factor": (0.0, 1e6),
    "attn_logit_softcapping": (0.0, 1e9),
    "final_logit_softcapping": (0.0, 1e9),
    "query_pre_attn_scalar": (1e-9, 1e9),
    "initializer_range": (0.0, 1e6),
}
"""Least and most value of other numbers."""

MAX_EXPERT_LAYERS = 1 << 17
"""Limit for layers times experts of one model, because every expert tensor is listed."""


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read and check ``config.json`` of a model folder, after a check of the folder's files;
    InputError if one is a FIFO, device or socket, or the config is missing or invalid."""
    check_regular_files(folder)
    content = read_json(folder / CONFIG)
    # with an auto_map the model has its own code, for which trust_remote_code is required
    if "auto_map" not in content or str(content.get("model_type")) in RENAMED:
        check_model_type(content.get("model_type"))
    check_numbers(content)
    generation = folder / GENERATION
    for file, found in (
        (CONFIG, content),
        (GENERATION, read_json(generation) if generation.exists() else {}),
    ):
        end = found.get("eos_token_id")
        ends = end if isinstance(end, list) else [] if end is None else [end]
        if not all(type(token) is int and 0 <= token < _LONG for token in ends):
            raise InputError(f"{file}: eos_token_id = {str(end)[:60]}: not a token id; give the id")
    return content


def check_numbers(content: dict[str, Any]) -> None:
    """Check the sizes and numbers of a config against their limits; InputError names the first
    value that is out of range or of the wrong type."""
    for key, (least, most) in SIZES.items():
        value = content.get(key)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise refuse(key, value, "not a valid size", f"give an integer from {least} to {most}")
    for key, (low, high) in NUMBERS.items():
        value = content.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and low <= value <= high):
            raise refuse(key, value, "out of range", f"give a number from {low:g} to {high:g}")
    dense = content.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise refuse("mlp_only_layers", dense, "not a list of layers", "give integers")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(content.get(key) or {}, dict):
            raise refuse(key, content[key], "not a JSON object", "give its settings by name")
    layers = content.get("num_hidden_layers") or 1
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        experts = content.get(key) or 0
        if layers * experts > MAX_EXPERT_LAYERS:
            raise refuse(key, experts, f"too many in {layers} layers", "correct one of the numbers")
