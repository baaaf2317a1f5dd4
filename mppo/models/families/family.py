"""An architecture in Megatron's terms, and what all architectures share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from mppo.recipe.model_shape import ModelShape, family_like, refuse, required


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (``gelu_pytorch_tanh``)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": F.relu,
}
_OTHER_KEYS = ("hidden_activation", "activation_function")


def activation_key(hf_config: Any) -> str:
    """The key of config.json that names the activation; by default ``hidden_act``."""
    named = (key for key in _OTHER_KEYS if getattr(hf_config, key, None))
    return next(named, "hidden_act")


def activation_name(hf_config: Any) -> str:
    """The name of the activation, a key of ``ACTIVATIONS``; ValueError if it is not supported.
    Gemma's ``hidden_act: gelu`` denotes the tanh form that its authors trained with and published
    so; later code ignores it unless ``hidden_activation`` is set."""
    key = activation_key(hf_config)
    name = getattr(hf_config, key, None)
    if family_like(hf_config) == "gemma" and key == "hidden_act" and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name not in ACTIVATIONS:
        raise refuse(key, name, "not supported", f"use one of {', '.join(ACTIVATIONS)}")
    return name


@dataclass(frozen=True)
class FamilyConfig:
    """An architecture in Megatron's terms.

    Args:
        transformer_kwargs: architecture fields of its TransformerConfig (no parallel sizes, no
            dtypes, no router training settings); with ``is_mla`` of an MLATransformerConfig.
        gpt_kwargs: arguments of ``GPTModel``; ``vocab_size`` is the real, unpadded one.
        config_attributes: attributes to set on the config object that are not dataclass fields.
        embedding_scale: factor on embedding outputs, rounded to the embedding's dtype (Gemma).
        final_logit_softcap: c in ``c * tanh(logits / c)``.
        attn_logit_softcap: the same c for attention scores, applied before the mask.
        sandwich_norms: further norms after attention and after the feed-forward layer.
        parallel_residual: attention and feed-forward both read the layer's input (GPT-NeoX).
        position_offset: row of the learned positions that belongs to the first token (OPT).
        zero_centered_norm: norms multiply by ``1 + weight``.
        layer_windows: tokens a query sees, itself included, by layer; None: all up to itself.
        activation: a key of ``ACTIVATIONS``.
        mla_norm_epsilon: epsilon of MLA's inner norms; None without MLA.
    """

    model_type: str
    is_mla: bool
    transformer_kwargs: dict[str, Any]
    gpt_kwargs: dict[str, Any]
    layer_windows: tuple[int | None, ...]
    config_attributes: dict[str, Any] = field(default_factory=dict)
    embedding_scale: float | None = None
    final_logit_softcap: float | None = None
    attn_logit_softcap: float | None = None
    sandwich_norms: bool = False
    parallel_residual: bool = False
    position_offset: int = 0
    zero_centered_norm: bool = False
    activation: str = "silu"
    mla_norm_epsilon: float | None = None


def family_of(
    hf_config: Any,
    shape: ModelShape,
    transformer_kwargs: dict[str, Any],
    gpt_kwargs: dict[str, Any] | None = None,
    layer_windows: tuple[int | None, ...] | None = None,
    **fields: Any,
) -> FamilyConfig:
    """A family's configuration: its own arguments, and those that all architectures share."""
    activation = activation_name(hf_config)
    epsilon = "layer_norm_eps" if shape.biases else "rms_norm_eps"
    common = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "layernorm_epsilon": 1e-5 if shape.like == "opt" else required(hf_config, epsilon),
        "activation_func": ACTIVATIONS[activation],
        "normalization": "LayerNorm" if shape.biases else "RMSNorm",
        "gated_linear_unit": shape.gated,
        "add_bias_linear": shape.biases,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return FamilyConfig(
        model_type=shape.model_type,
        is_mla=shape.mla is not None,
        transformer_kwargs=common | transformer_kwargs,
        gpt_kwargs={
            "vocab_size": shape.vocab,
            "share_embeddings_and_output_weights": shape.tied,
            "position_embedding_type": "learned_absolute" if shape.positions else "rope",
            "max_sequence_length": shape.positions or 1,
            **(gpt_kwargs or {}),
        },
        layer_windows=layer_windows or (None,) * shape.num_layers,
        activation=activation,
        position_offset=shape.position_offset,
        **fields,
    )
