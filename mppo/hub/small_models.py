"""Small models of random weights whose config.json is another model's with small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mppo.hub.builtin import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    cache_folder,
    definition_hash,
    save_random_model,
    written_once,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "query_pre_attn_scalar": 8, "vocab_size": len(VOCAB),
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
"""Largest values of a small model's config.json; smaller ones, and keys that it lacks, stay."""


def cached_small_model(plain: Mapping[str, Any]) -> Path:
    """The folder, in Hugging Face form, of a small model in the cache, written if it is missing.
    Several processes may call this at the same time; ``plain``: content of a config.json."""
    digest = definition_hash([dict(plain), SIZES, VOCAB])
    folder = cache_folder() / f"small-{plain['model_type']}-{digest}"
    return written_once(folder, lambda unfinished: write_small_model(plain, unfinished))


def write_small_model(plain: Mapping[str, Any], folder: Path) -> None:
    """Write a model with a config's family, head and options, but small sizes, and a byte
    tokenizer."""
    small = {**plain, **{k: min(v, plain[k]) for k, v in SIZES.items() if plain.get(k) is not None}}
    if "num_key_value_heads" in plain:
        grouped = plain["num_key_value_heads"] < plain["num_attention_heads"]
        small["num_key_value_heads"] = 2 if grouped else small["num_attention_heads"]
    tokens = zip(("pad", "bos", "eos"), (PAD, BOS, EOS))
    small |= {f"{kind}_token_id": VOCAB.index(token) for kind, token in tokens}
    (architecture,) = small.pop("architectures")
    save_random_model(small, folder, architecture.endswith("ForSequenceClassification"))
