"""The sizes of a model, read from its Hugging Face config under each family's names.

Arithmetic on a config object (attributes as in transformers), without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from mppo import register
from mppo.safety.input_error import InputError

MLA_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_SHARED_FAMILIES = (*MLA_FAMILIES, "glm4_moe")
"""Mixtures with shared experts and dense first layers under DeepSeek's keys."""
_PLAIN_FAMILIES = ("gpt_neox", "opt")
"""Families with LayerNorm, an ungated feed-forward, and biases in all linear layers."""
QKV_BIAS_KEYS = {
    "qwen2_moe": ("qkv_bias", True),
    "glm4": ("attention_bias", False),
    "glm4_moe": ("attention_bias", False),
    "seed_oss": ("attention_bias", True),
}
"""The key of config.json for biases of queries, keys and values, and its default."""
VALUE_BINS = "value_bins"
"""mppo's key of config.json for the outputs of a value head; absent: 1."""
_POSITION_OFFSET = 2
"""Rows of OPT's learned positions before that of the first token."""


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
"""Why mppo does not compute a family that users ask for, by ``model_type``: what Megatron-Core
0.16.1 lacks, and what the family needs in transformers 5.12.1."""

RENAMED: dict[str, tuple[str, str]] = {
    "kimi_k2": ("deepseek_v3", "Kimi-K2's layers and tensors are DeepSeek-V3's"),
    "mimo": ("qwen2", "MiMo-7B's layers and tensors are Qwen2's"),
}
"""The family that computes the same, and why, by a ``model_type`` that transformers lacks."""


@dataclass(frozen=True)
class MLAShape:
    """Sizes of multi-head latent attention; ``q_lora_rank`` None: a plain query projection."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """All sizes that determine a model's tensors and their shapes.

    ``sparse_layers`` has one entry per layer: True if the feed-forward is a mixture of experts.
    ``ffn`` is the width of dense layers, ``expert_ffn`` of one expert, ``shared_ffn`` of all shared
    experts together (0: none). ``extra_layers`` is the number of multi-token-prediction layers
    stored after the decoder (``model.layers.{num_layers + i}``). ``biases``: all linear layers and
    norms have a bias. ``positions`` is the number of learned positions (0: none), of which the
    first ``position_offset`` belong to no token. ``value_bins`` is the number of a value head's
    outputs.
    """

    model_type: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    sparse_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    extra_layers: int = 0
    gated: bool = True
    biases: bool = False
    positions: int = 0
    position_offset: int = 0
    mla: MLAShape | None = None
    value_bins: int = 1

    @property
    def like(self) -> str:
        """The family of mppo whose rules hold: the model's own, or that of a plugin's family."""
        return register.family.traits(self.model_type).like


def family_like(hf_config: Any) -> str:
    return register.family.traits(hf_config.model_type).like


def refuse(key: str, value: Any, why: str, fix: str) -> InputError:
    """The error for an unsupported config: key, value, why, fix."""
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return InputError(f"config.json: {key} = {shown}: {why}; {fix}")


def required(hf_config: Any, key: str) -> Any:
    """The value of ``key``; ValueError if it is absent or null."""
    value = getattr(hf_config, key, None)
    if value is None:
        raise refuse(key, value, "this family cannot be built without it", "add it to config.json")
    return value


def check_family(hf_config: Any) -> str:
    """The config's ``model_type``; ValueError if the family is not supported."""
    return check_model_type(getattr(hf_config, "model_type", None))


def check_model_type(model_type: Any) -> str:
    """``model_type`` itself. Raises as ``check_family``."""
    if str(model_type) in RENAMED:
        family, why = RENAMED[str(model_type)]
        why, fix = f"{why}, but transformers has no such type", f"set it to {family} in config.json"
        raise refuse("model_type", model_type, why, fix)
    if model_type not in register.family.names:
        why = DIFFERENT.get(str(model_type), "this family is not supported")
        raise refuse(
            "model_type", model_type, why,
            f"use one of {', '.join(register.family.names)} (docs/adding_a_family.md says how to "
            "add one)",
        )  # fmt: skip
    return model_type


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """Rotary settings as a flat dictionary that always has ``rope_theta`` and ``rope_type``. Reads
    ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before).
    ValueError: different settings per attention type."""
    stated = getattr(hf_config, "rope_parameters", None)
    parameters = dict(stated or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise refuse(
            "rope_parameters", parameters, "settings differ between attention types",
            "use a model with one rotary setting for all layers",
        )  # fmt: skip
    if not parameters:
        parameters = dict(getattr(hf_config, "rope_scaling", None) or {})
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = getattr(hf_config, "rope_theta", None) or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["rope_type"] = kind
    return parameters


def max_positions(hf_config: Any) -> int | None:
    """Longest sequence of the position encoding; None if the config has no limit or rescales it."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    return limit if rope_parameters(hf_config)["rope_type"] == "default" else None


def sparse_layers(hf_config: Any) -> tuple[bool, ...]:
    """Return which decoder layers are mixtures of experts, one entry per layer."""
    count, like = hf_config.num_hidden_layers, family_like(hf_config)
    if like == "mixtral":
        return (True,) * count
    if like in ("qwen2_moe", "qwen3_moe"):
        step = getattr(hf_config, "decoder_sparse_step", None) or 1
        dense = set(getattr(hf_config, "mlp_only_layers", None) or ())
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(count))
    if like in _SHARED_FAMILIES:
        if getattr(hf_config, "n_routed_experts", None) is None:
            return (False,) * count
        first = _first_dense_layers(hf_config)
        frequency = getattr(hf_config, "moe_layer_freq", None) or 1
        if frequency != 1:
            raise refuse(
                "moe_layer_freq", frequency, "the family's own code supports only 1",
                "list dense layers through first_k_dense_replace",
            )  # fmt: skip
        return tuple(i >= first for i in range(count))
    return (False,) * count


def _first_dense_layers(hf_config: Any) -> int:
    """Dense layers before the first mixture of experts; GLM-4.7-Flash lists the kind of each."""
    if family_like(hf_config) != "glm4_moe_lite":
        return getattr(hf_config, "first_k_dense_replace", None) or 0
    kinds = list(required(hf_config, "mlp_layer_types"))
    first = kinds.count("dense")
    if kinds != ["dense"] * first + ["sparse"] * (hf_config.num_hidden_layers - first):
        raise refuse(
            "mlp_layer_types", kinds, "must be one kind per layer, the dense layers first, as "
            "SGLang has them (first_k_dense_replace)", "list dense, then sparse",
        )  # fmt: skip
    return first


def model_shape(hf_config: Any) -> ModelShape:
    """Sizes of the model a transformers config describes; ValueError if the family is not
    supported, or a size is missing or not divisible."""
    traits = register.family.traits(check_family(hf_config))
    like = traits.like
    heads, hidden = required(hf_config, "num_attention_heads"), required(hf_config, "hidden_size")
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    sparse = sparse_layers(hf_config)
    mla = _mla_shape(hf_config) if like in MLA_FAMILIES else None
    if mla is not None:
        kv_heads = heads
    if heads % kv_heads:
        raise refuse(
            "num_key_value_heads", kv_heads, f"does not divide num_attention_heads = {heads}",
            "correct one of the two",
        )  # fmt: skip
    head_dim = None if mla else getattr(hf_config, "head_dim", None)
    bias_key, usual = QKV_BIAS_KEYS.get(like, (None, like == "qwen2"))
    qkv_bias = usual if bias_key is None else bool(getattr(hf_config, bias_key, usual))
    plain, learned = like in _PLAIN_FAMILIES, like == "opt"
    shape = ModelShape(
        model_type=hf_config.model_type,
        num_layers=required(hf_config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn=required(hf_config, "ffn_dim" if learned else "intermediate_size"),
        vocab=required(hf_config, "vocab_size"),
        tied=bool(getattr(hf_config, "tie_word_embeddings", False)),
        qkv_bias=plain or qkv_bias,
        qk_norm=like in ("qwen3", "qwen3_moe")
        or (like == "glm4_moe" and bool(getattr(hf_config, "use_qk_norm", False))),
        sandwich_norms=like in ("gemma2", "glm4"),
        sparse_layers=sparse,
        extra_layers=getattr(hf_config, "num_nextn_predict_layers", None) or 0,
        gated=not plain,
        biases=plain,
        **(_learned_positions(hf_config) if learned else {}),
        mla=mla,
        value_bins=getattr(hf_config, VALUE_BINS, 1),
        **(_expert_sizes(hf_config, like) if any(sparse) else {}),
    )
    return replace(shape, **traits.sizes(hf_config))


def with_value_bins(hf_config: Any, bins: int) -> Any:
    """A transformers config of the same model with this many outputs of its value head."""
    if getattr(hf_config, VALUE_BINS, 1) == bins:
        return hf_config
    changed = copy(hf_config)
    setattr(changed, VALUE_BINS, bins)
    return changed


def _learned_positions(hf_config: Any) -> dict[str, int]:
    longest = required(hf_config, "max_position_embeddings")
    return {"positions": longest + _POSITION_OFFSET, "position_offset": _POSITION_OFFSET}


def _mla_shape(hf_config: Any) -> MLAShape:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {key: required(hf_config, key) for key in keys}
    return MLAShape(getattr(hf_config, "q_lora_rank", None), **sizes)


def _expert_sizes(hf_config: Any, like: str) -> dict[str, Any]:
    if like == "mixtral":
        return {
            "num_experts": required(hf_config, "num_local_experts"),
            "expert_ffn": required(hf_config, "intermediate_size"),
        }
    width = required(hf_config, "moe_intermediate_size")
    if like in _SHARED_FAMILIES:
        return {
            "num_experts": required(hf_config, "n_routed_experts"),
            "expert_ffn": width,
            "shared_ffn": width * (getattr(hf_config, "n_shared_experts", None) or 0),
            "expert_bias": like != "deepseek_v2",
        }
    shared = like == "qwen2_moe"
    return {
        "num_experts": required(hf_config, "num_experts"),
        "expert_ffn": width,
        "shared_ffn": required(hf_config, "shared_expert_intermediate_size") if shared else 0,
        "shared_gate": shared,
    }
