"""The values that Megatron-LM reads from ``common.pt`` beside the tensors."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mppo.models.families.architectures import family_config
from mppo.models.families.family import FamilyConfig
from mppo.recipe.model_shape import model_shape

_OTHER_NAMES = ("activation_func", "gated_linear_unit", "num_moe_experts")
"""Fields of Megatron's configuration that are no arguments of Megatron-LM."""
_YARN_ARGUMENTS = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
"""Arguments of Megatron-LM that lack the prefix of the attribute they set."""


def common_state(hf_config: Any) -> dict[str, object]:
    """Version, iteration, and the arguments that Megatron-LM stores when it saves.

    Without ``--finetune`` Megatron-LM's loader compares layers, width and heads with those of the
    run. If ``args`` is missing, its ``checkpointing.py`` of commit 699abf15 fails, and that
    of commit 0032978f does not. Megatron-LM looks for no optimizer or random state if
    ``latest_checkpointed_iteration.txt`` contains ``release``. Raises as ``family_config``.
    """
    arguments = Namespace(**megatron_arguments(hf_config))
    return {"checkpoint_version": 3.0, "iteration": 0, "args": arguments}


def megatron_arguments(hf_config: Any) -> dict[str, Any]:
    """The model's arguments by Megatron-LM's names.

    They include all that Megatron-LM's ``load_args_from_checkpoint`` (``--use-checkpoint-args``,
    commit d98e8a64) reads for a GPT model, except those that are no property of the weights: the
    tokenizer's path, the dispatcher and the grouping of experts.
    """
    family, shape = family_config(hf_config), model_shape(hf_config)
    fields = family.transformer_kwargs
    longest = shape.positions or hf_config.max_position_embeddings
    sparse = bool(shape.num_experts)
    return {
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        **{name: value for name, value in fields.items() if name not in _OTHER_NAMES},
        "norm_epsilon": fields["layernorm_epsilon"],
        "group_query_attention": shape.kv_heads != shape.heads,
        "multi_latent_attention": family.is_mla,
        "swiglu": shape.gated and family.activation == "silu",
        "squared_relu": False,
        "apply_layernorm_1p": family.zero_centered_norm,
        "apply_query_key_layer_scaling": False,
        "untie_embeddings_and_output_weights": not shape.tied,
        "padded_vocab_size": shape.vocab,
        "num_experts": shape.num_experts if sparse else None,
        "moe_layer_freq": fields.get("moe_layer_freq", 1),
        "seq_length": longest,
        "max_position_embeddings": longest,
        **_position_arguments(family),
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
    }


def _position_arguments(family: FamilyConfig) -> dict[str, object]:
    """Arguments of the position encoding; those of latent attention are fields."""
    given, scaling = family.gpt_kwargs, family.config_attributes
    yarn = {k: value for k, value in scaling.items() if k.startswith("yarn_")}
    own = {} if family.is_mla else {"rotary_base": given.get("rotary_base", 10000)}
    return {
        "position_embedding_type": given["position_embedding_type"],
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_percent": given.get("rotary_percent", 1.0),
        "rotary_interleaved": family.transformer_kwargs.get("rotary_interleaved", False),
        "rotary_seq_len_interpolation_factor": given.get("seq_len_interpolation_factor"),
        "use_rope_scaling": given.get("rope_scaling", False),
        "rope_scaling_factor": given.get("rope_scaling_factor", 8.0),
        **own,
        **yarn,
        **{_YARN_ARGUMENTS[k]: value for k, value in yarn.items() if k in _YARN_ARGUMENTS},
    }
