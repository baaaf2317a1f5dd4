"""Gemma (1) in SGLang, with the activation its config.json asks for and norms as stored."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.activation import GeluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.models import gemma
from sglang.srt.models.gemma2 import Gemma2ForCausalLM

from mppo.models.families.activations import activation_name

_FORMS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


class GemmaForCausalLM(gemma.GemmaForCausalLM):
    """SGLang's own computes the exact GELU whatever config.json says. It also keeps ``1 + weight``
    of a norm in place of the weight, rounded to the model's type, and adds the 1 to the very tensor
    it is given; here norms are those of SGLang's Gemma 2, which add the 1 as they compute."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.rms_norm_eps
        for layer in self.model.layers:
            layer.mlp.act_fn = GeluAndMul(_FORMS[activation_name(config)])
            layer.input_layernorm = GemmaRMSNorm(size, eps)
            layer.post_attention_layernorm = GemmaRMSNorm(size, eps)
        self.model.norm = GemmaRMSNorm(size, eps)

    load_weights = Gemma2ForCausalLM.load_weights


EntryClass = GemmaForCausalLM
