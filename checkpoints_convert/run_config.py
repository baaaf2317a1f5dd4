"""The file from which Megatron-Bridge builds the model of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from mppo.models.families.architectures import family_config
from mppo.models.families.family import FamilyConfig
from mppo.recipe.model_shape import model_shape

RUN_CONFIG = "run_config.yaml"
"""Its name, inside the checkpoint's folder."""
_PROVIDERS = "megatron.bridge.models"
_ACTIVATIONS = ("silu", "gelu", "relu")
"""Activations that are functions of ``torch.nn.functional``."""


def run_config(hf_config: Any, dtype: torch.dtype | None) -> dict[str, Any] | None:
    """The content of ``run_config.yaml`` for weights of ``dtype``, under the names of
    Megatron-Bridge (commit 067f987d); None for a family that is more than Megatron's GPT model
    (scaled embeddings, soft caps, further norms, parallel residual, OPT's positions). Raises as
    ``family_config``."""
    family, shape = family_config(hf_config), model_shape(hf_config)
    if not _is_plain(family):
        return None
    provider = "mla_provider.MLAModelProvider" if family.is_mla else "gpt_provider.GPTModelProvider"
    fields = dict(family.transformer_kwargs)
    fields["activation_func"] = {
        "_target_": f"torch.nn.functional.{family.activation}",
        "_call_": False,
    }
    given = {k: value for k, value in family.gpt_kwargs.items() if k != "max_sequence_length"}
    yarn = {k: v for k, v in family.config_attributes.items() if k.startswith("yarn_")}
    if shape.num_experts:
        fields["transformer_layer_spec"] = {
            "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
            "_partial_": True,
            "use_transformer_engine": True,
        }
    if "window_size" in fields:
        fields["window_size"] = list(fields["window_size"])
    model = {
        "_target_": f"{_PROVIDERS}.{provider}",
        **fields,
        **given,
        **yarn,
        "layernorm_zero_centered_gamma": family.zero_centered_norm,
        "seq_length": hf_config.max_position_embeddings,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    saved = {"save_optim": False, "save_rng": False, "fully_parallel_save": False}
    return {"model": model, "checkpoint": saved}


def _is_plain(family: FamilyConfig) -> bool:
    """Whether Megatron's GPT model, without code of mppo, computes the family."""
    further = (
        family.embedding_scale,
        family.final_logit_softcap,
        family.attn_logit_softcap,
        family.sandwich_norms,
        family.parallel_residual,
        family.position_offset,
    )
    return not any(further) and family.activation in _ACTIVATIONS
