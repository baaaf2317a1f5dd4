"""Rules for the fields of Megatron's TransformerConfig that ``override_transformer_config`` sets.

Allowed are fields that change how a model is computed: precision of an operation, fusion,
recomputation. Refused are fields that the recipe has a key for, that the model's config.json
determines, or that would invalidate the results of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from mppo.models.families.architectures import family_config
from mppo.recipe.errors import ConfigIssue, nearest
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.role_config import RoleConfig

OTHER_NAMES = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "bf16", "fp16", "enable_autocast", "autocast_dtype"),
        "model.dtype",
    ),
    **dict.fromkeys(
        (
            "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "pipeline_layers",
    ),
    **dict.fromkeys(
        ("hierarchical_context_parallel_sizes", "hybrid_context_parallel"), "cp_comm_type"
    ),
    "moe_extended_tp": "expert_tensor_parallel_size",
    "moe_token_dropping": "moe_expert_capacity_factor",
    "moe_enable_routing_replay": "actor.router_replay",
}  # fmt: skip
"""Recipe keys of fields that have another name there; a key without a dot is below ``megatron``."""

DECIDED = {
    **dict.fromkeys(
        (
            "hidden_dropout", "attention_dropout", "moe_input_jitter_eps",
            "moe_router_force_load_balancing",
        ),
        "randomness in a forward pass changes the log-probabilities of the same weights from pass "
        "to pass, and the policy's ratio would treat that as a change of the policy",
    ),
    **dict.fromkeys(
        (
            "calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func",
            "no_sync_func", "grad_sync_func", "param_sync_func",
        ),
        "losses already carry the normaliser of the global batch, so Megatron must only sum "
        "gradients",
    ),
    **dict.fromkeys(
        (
            "variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p",
            "deallocate_pipeline_outputs",
        ),
        "the layout and the device determine it; another value gives wrong gradients or none",
    ),
    "delay_wgrad_compute": "nothing in this loop computes the delayed weight gradients",
}  # fmt: skip
"""Fields that must keep the value that mppo sets, and why."""

ARCHITECTURE = frozenset(
    {
        "layernorm_zero_centered_gamma", "multi_latent_attention", "softmax_scale", "softmax_type",
        "window_size", "window_attn_skip_freq", "no_rope_freq", "qk_l2_norm", "rotary_interleaved",
        "attention_output_gate", "apply_residual_connection_post_layernorm", "glu_linear_offset",
        "activation_func_clamp_value", "moe_apply_probs_on_input", "mtp_num_layers",
    }
)  # fmt: skip
"""Fields that define the function a model computes, besides those its family sets."""


def override_issues(role: RoleConfig, hf_config: Any) -> Iterator[ConfigIssue]:
    """Yield an issue for every field of ``override_transformer_config`` that may not be set;
    ValueError if Megatron cannot represent the model exactly."""
    overrides = role.megatron.override_transformer_config
    if not overrides:
        return
    family = family_config(hf_config)
    architecture = ARCHITECTURE | family.transformer_kwargs.keys()
    known = transformer_fields(family.is_mla)
    for name, value in overrides.items():
        key = f"{role.key}.override_transformer_config.{name}"
        recipe_key = _recipe_key(role, name)
        if recipe_key is not None:
            yield ConfigIssue(key, value, "the recipe has a key for it", f"set {recipe_key}")
        elif name in DECIDED:
            yield ConfigIssue(key, value, DECIDED[name], "remove it")
        elif name in architecture:
            fix = f"remove it, or set {role.path_key} to a model whose config.json has this value"
            why = "is part of the model, and the rollout engine would still run the original"
            yield ConfigIssue(key, value, why, fix)
        elif name not in known:
            guess = nearest(name, known - architecture - DECIDED.keys())
            fix = f"did you mean {guess}?" if guess else "remove it"
            yield ConfigIssue(
                key, value, "Megatron-Core's TransformerConfig has no such field", fix
            )
    modules = overrides.get("recompute_modules")
    apart = isinstance(modules, list) and "moe" in modules and "num_moe_experts" in architecture
    if apart and role.megatron.recompute_granularity == "selective":
        key = f"{role.key}.override_transformer_config.recompute_modules"
        fix = f"set {role.key}.recompute_granularity to full, or remove 'moe'"
        why = "'moe' recomputes the router apart from its layer, on another micro-batch's packing"
        yield ConfigIssue(key, modules, why, fix)


def transformer_fields(is_mla: bool) -> frozenset[str]:
    """Field names of the installed Megatron-Core's TransformerConfig, or MLATransformerConfig."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if is_mla else TransformerConfig
    return frozenset(field.name for field in fields(kind) if not field.name.startswith("_"))


def _recipe_key(role: RoleConfig, name: str) -> str | None:
    name = OTHER_NAMES.get(name, name)
    if "." in name:
        return name
    return f"{role.key}.{name}" if name in MegatronConfig.model_fields else None
