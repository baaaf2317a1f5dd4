"""The transformers model that computes the same function as the actor, built here only.

In a few places transformers deviates from the code that a model was published with, which the actor
follows. This module corrects these places for every user: the local rollout engine, the reference
of ``verify_sync``, ``verify --logits`` and the tests.

- DeepSeek-V2 lacks YaRN's factor on its attention scores, which V3 has.
- Gemma interprets ``hidden_act: gelu`` literally (see ``activations.activation_name``).
- ``head_dim: null``, which stands for hidden size over heads, fails in some families' rotary
  angles.

MLA's inner norms already have the published epsilon (``architectures.MLA_NORM_EPSILON``).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mppo.models.families.family import activation_name
from mppo.models.families.rope import mla_scale_factor
from mppo.recipe.model_shape import check_family, family_like, model_shape

WIDE_BUFFER = "e_score_correction_bias"
"""Suffix of the routing biases, which are float32 whatever the model's dtype."""
_ACTIVATION = {"gemma2": "hidden_activation", "opt": "activation_function"}
"""The key under which transformers reads the activation, if it is not ``hidden_act``."""
_GROUPED_ALIGNMENT = 16
"""torch's grouped product needs rows of a multiple of this many bytes."""


def load_model(folder: str | Path) -> PreTrainedModel:
    """Load the model of a Hugging Face folder in float32, in eval mode; code in it is never run."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=False,
        use_safetensors=True,
        **_arguments(config, torch.float32, "eager"),
    )
    return _corrected(model).eval()


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str = "eager"
) -> PreTrainedModel:
    """Build a model with uninitialised parameters, in eval mode, without gradients."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(**_arguments(config, dtype, attention))
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name.endswith(WIDE_BUFFER):
            buffer.data = buffer.data.float()
    return _corrected(model).eval().requires_grad_(False)


def _arguments(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> dict[str, Any]:
    check_family(config)
    config = copy.deepcopy(config)
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = model_shape(config).head_dim
    setattr(config, _ACTIVATION.get(family_like(config), "hidden_act"), activation_name(config))
    arguments = {"config": config, "dtype": dtype, "attn_implementation": attention}
    if not _has_grouped_product(config, dtype):
        arguments["experts_implementation"] = "eager"
    return arguments


def _has_grouped_product(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    shape = model_shape(config)
    widths = (shape.hidden, shape.expert_ffn)
    return all(width * dtype.itemsize % _GROUPED_ALIGNMENT == 0 for width in widths)


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    if model.config.model_type == "deepseek_v2":
        factor = mla_scale_factor(model.config)
        decoder: Any = model.get_decoder()  # transformers does not annotate the layers
        for layer in decoder.layers:
            layer.self_attn.scaling *= factor
    return model
