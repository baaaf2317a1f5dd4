"""Rotary position settings: Megatron's exact equivalents of Hugging Face's types.

Frequencies and the cosine factor follow ``transformers.modeling_rope_utils``; YaRN is Peng et al.
2023 (https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

import math
from typing import Any

from mppo.recipe.model_shape import family_like, refuse, rope_parameters
from mppo.safety.input_error import InputError

_PARTLY_ROTATED = ("gpt_neox", "glm4", "glm4_moe")
"""Families whose heads may be rotated in part: the first ``partial_rotary_factor`` of each."""

LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain_rope(hf_config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate the rotary settings of multi-head and grouped-query attention into arguments for
    ``GPTModel``, and attributes of the config; ValueError where Megatron has no equivalent."""
    rope = _checked(hf_config)
    kind, base = rope["rope_type"], {"rotary_base": rope["rope_theta"]}
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        base["rotary_percent"] = part
    if kind == "default":
        return base, {}
    if kind == "linear":
        return base | {"seq_len_interpolation_factor": float(rope["factor"])}, {}
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if rope.get(key, fixed) != fixed:
                raise refuse(
                    f"rope_parameters.{key}", rope[key], f"Megatron has a fixed {fixed}",
                    "use a checkpoint with this value",
                )  # fmt: skip
        return base | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}, {}
    if kind == "yarn":
        return base | {"position_embedding_type": "yarn"}, _plain_yarn(hf_config, rope)
    raise _unknown(kind)


def mla_rope(hf_config: Any) -> dict[str, Any]:
    """Translate the rotary settings of MLA into fields of ``MLATransformerConfig``; ValueError
    where Megatron has no equivalent."""
    rope = _checked(hf_config)
    if rope["rope_type"] == "default":
        return {
            "rope_type": "rope",
            "rotary_base": rope["rope_theta"],
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    if rope["rope_type"] != "yarn":
        raise _unknown(rope["rope_type"])
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale_all_dim and not mscale:
        raise refuse("rope_parameters.mscale", mscale, "mscale_all_dim needs it", "set both")
    if mscale not in (None, 1.0) and not mscale_all_dim:
        raise refuse(
            "rope_parameters.mscale", mscale,
            "transformers ignores it without mscale_all_dim, other engines do not", "set both",
        )  # fmt: skip
    if rope.get("attention_factor") is not None:
        raise refuse(
            "rope_parameters.attention_factor", rope["attention_factor"],
            "Megatron computes it from mscale", "remove it",
        )  # fmt: skip
    if not rope.get("truncate", True):
        raise refuse(
            "rope_parameters.truncate", False, "Megatron's MLA always rounds the correction range",
            "remove it",
        )  # fmt: skip
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": _factor(hf_config, rope),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": float(mscale) if mscale and mscale_all_dim else 1.0,
        "mscale_all_dim": float(mscale_all_dim) if mscale_all_dim else 0.0,
    }


def mla_scale_factor(hf_config: Any) -> float:
    """The factor on MLA's scores besides ``1 / sqrt(head width)``: with YaRN
    ``(0.1 * mscale_all_dim * ln(factor) + 1) ** 2``, else 1 (``modeling_deepseek.py``)."""
    rope = mla_rope(hf_config)
    factor = max(1.0, rope["rotary_scaling_factor"])
    return (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2


def _plain_yarn(hf_config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    factor = _factor(hf_config, rope)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    stated = rope.get("attention_factor")
    if stated is not None and factor > 1:
        # solve for Megatron's factor on the cosines:
        # (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
        mscale, mscale_all_dim = (stated - 1.0) / (0.1 * math.log(factor)), 0.0
    elif not (mscale and mscale_all_dim):
        mscale = mscale_all_dim = None
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32,
        "yarn_beta_slow": rope.get("beta_slow") or 1,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": mscale_all_dim,
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


def _factor(hf_config: Any, rope: dict[str, Any]) -> float:
    if rope.get("factor") is not None:
        return float(rope["factor"])
    return hf_config.max_position_embeddings / rope["original_max_position_embeddings"]


def _checked(hf_config: Any) -> dict[str, Any]:
    rope = rope_parameters(hf_config)
    part = rope.get("partial_rotary_factor", 1.0)
    partial = family_like(hf_config) in _PARTLY_ROTATED
    partial = partial and rope["rope_type"] in ("default", "linear")
    if part != 1.0 and not partial:
        raise refuse(
            "rope_parameters.partial_rotary_factor", part,
            f"only {', '.join(_PARTLY_ROTATED)} may rotate heads in part, without scaling or with "
            "linear scaling",
            "use a checkpoint with 1.0",
        )  # fmt: skip
    if rope["rope_type"] in ("linear", "llama3") and rope.get("factor") is None:
        raise refuse("rope_parameters.factor", None, f"{rope['rope_type']} needs it", "add it")
    if rope["rope_type"] == "yarn" and not rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = hf_config.max_position_embeddings
    return rope


def _unknown(kind: str) -> InputError:
    return refuse(
        "rope_parameters.rope_type", kind, "Megatron does not have it for this family",
        "use a checkpoint with default, linear, llama3 or yarn (MLA: default, yarn)",
    )  # fmt: skip
