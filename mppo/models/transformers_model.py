"""The transformers model that computes what the actor does: the one place that builds it.

Transformers' code departs here and there from the code that a model was published with, which the
actor follows. What departs is put right here, for every use: the local rollout engine, the oracle
of ``verify_sync``, ``verify --logits`` and the tests.

- DeepSeek-V2 lacks the factor of YaRN on its attention scores, which V3 has.
- Gemma takes ``hidden_act: gelu`` at its word (see ``families.activation_name``).
- ``head_dim: null``, which means hidden size over heads, fails in some families' rotary angles.

Of MLA's inner norms it has the published epsilon already
(``families.MLA_NORM_EPSILON``).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from mppo.models.families.architectures import activation_name
from mppo.models.families.rope import mla_scale_factor
from mppo.weights.shape import check_family, model_shape

WIDE_BUFFER = "e_score_correction_bias"
"""Routing biases: float32 whatever the model's type."""
_GROUPED_ALIGNMENT = 16
"""Bytes that a row of an expert's weights must be a multiple of in torch's grouped product."""


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> PreTrainedModel:
    """The model of a Hugging Face folder, in eval mode.

    Args:
        folder: with config.json and safetensors files; its own code is never run.
        dtype: parameters' and activations' type.
        attention: name of transformers' attention implementation.

    Raises:
        ValueError: no family of this package, or settings it refuses.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=False,
        use_safetensors=True,
        **_arguments(config, dtype, attention),
    )
    return _corrected(model).eval()


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: str = "eager"
) -> PreTrainedModel:
    """The model of a config with uninitialised parameters, in eval mode, without gradients.

    Args and Raises as of :func:`load_model`; ``device`` is where it is made.
    """
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
    key = "hidden_activation" if config.model_type == "gemma2" else "hidden_act"
    setattr(config, key, activation_name(config))
    arguments = {"config": config, "dtype": dtype, "attn_implementation": attention}
    if not _has_grouped_product(config, dtype):
        arguments["experts_implementation"] = "eager"
    return arguments


def _has_grouped_product(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    """Whether torch's product with many experts at once takes weights of these widths."""
    shape = model_shape(config)
    widths = (shape.hidden, shape.expert_ffn)
    return all(width * dtype.itemsize % _GROUPED_ALIGNMENT == 0 for width in widths)


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    if model.config.model_type == "deepseek_v2":
        factor = mla_scale_factor(model.config)
        for layer in model.get_decoder().layers:
            layer.self_attn.scaling *= factor
    return model
