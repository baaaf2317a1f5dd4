"""An architecture in Megatron's terms, and what all architectures share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mppo.models.families.activations import ACTIVATIONS, activation_name
from mppo.weights.shape import ModelShape, required


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
        window_size: tokens a query sees, itself included, in the layers of ``window_layers``.
        activation: a key of ``ACTIVATIONS``.
        mla_norm_epsilon: epsilon of MLA's inner norms; None without MLA.
    """

    model_type: str
    is_mla: bool
    transformer_kwargs: dict[str, Any]
    gpt_kwargs: dict[str, Any]
    config_attributes: dict[str, Any] = field(default_factory=dict)
    embedding_scale: float | None = None
    final_logit_softcap: float | None = None
    attn_logit_softcap: float | None = None
    sandwich_norms: bool = False
    parallel_residual: bool = False
    position_offset: int = 0
    zero_centered_norm: bool = False
    window_size: int | None = None
    window_layers: tuple[bool, ...] = ()
    activation: str = "silu"
    mla_norm_epsilon: float | None = None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Tokens a query sees, itself included, by layer; None: all up to itself."""
        layers = self.window_layers or (False,) * self.transformer_kwargs["num_layers"]
        return tuple(self.window_size if windowed else None for windowed in layers)


def _common_kwargs(hf_config: Any, shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "layernorm_epsilon": _norm_epsilon(hf_config, shape),
        "activation_func": ACTIVATIONS[activation_name(hf_config)],
        "normalization": "LayerNorm" if shape.biases else "RMSNorm",
        "gated_linear_unit": shape.gated,
        "add_bias_linear": shape.biases,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def family_of(
    hf_config: Any,
    shape: ModelShape,
    transformer_kwargs: dict[str, Any],
    gpt_kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> FamilyConfig:
    """A family's configuration: its own arguments, and those that all architectures share."""
    return FamilyConfig(
        model_type=shape.model_type,
        is_mla=shape.mla is not None,
        transformer_kwargs=_common_kwargs(hf_config, shape) | transformer_kwargs,
        gpt_kwargs={
            "vocab_size": shape.vocab,
            "share_embeddings_and_output_weights": shape.tied,
            "position_embedding_type": "learned_absolute" if shape.positions else "rope",
            "max_sequence_length": shape.positions or 1,
            **(gpt_kwargs or {}),
        },
        activation=activation_name(hf_config),
        position_offset=shape.position_offset,
        **fields,
    )


def _norm_epsilon(hf_config: Any, shape: ModelShape) -> float:
    if shape.like == "opt":
        return 1e-5
    return required(hf_config, "layer_norm_eps" if shape.biases else "rms_norm_eps")
