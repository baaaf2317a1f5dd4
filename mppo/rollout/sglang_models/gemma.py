"""Gemma (1) in SGLang, with the activation of config.json and unmodified norm weights."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.activation import GeluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.models import gemma
from sglang.srt.models.gemma2 import Gemma2ForCausalLM

from mppo.models.families.family import activation_name

_FORMS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


class GemmaForCausalLM(gemma.GemmaForCausalLM):
    """Gemma with the activation of config.json, and with the norms of SGLang's Gemma 2.

    SGLang's own class always computes the exact GELU. It also stores ``1 + weight`` of a norm,
    rounded to the model's dtype, and adds the 1 in place to the tensor it receives; the norms of
    Gemma 2 add the 1 when they compute.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.rms_norm_eps
        model: Any = self.model
        for layer in model.layers:
            layer.mlp.act_fn = GeluAndMul(_FORMS[activation_name(config)])
            layer.input_layernorm = GemmaRMSNorm(size, eps)
            layer.post_attention_layernorm = GemmaRMSNorm(size, eps)
        model.norm = GemmaRMSNorm(size, eps)

    # it reads only attributes that both classes have, and does not change norm weights
    load_weights = Gemma2ForCausalLM.load_weights  # pyright: ignore[reportAssignmentType]  # by class


EntryClass = GemmaForCausalLM
