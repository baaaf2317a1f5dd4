"""Seed-OSS and SmolLM3 in SGLang, which has no classes for these families."""

from __future__ import annotations

from copy import copy
from typing import Any, cast

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from torch import Tensor, nn


class _Unrotated(nn.Module):
    """Queries and keys of a layer without rotary positions."""

    def forward(self, _positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class SeedOssForCausalLM(Qwen2ForCausalLM):
    """Qwen2's layers, whose heads may have a width of their own."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # SGLang sets this on a CPU, and its layers then ignore head_dim
        config = copy(config)
        vars(config).pop("original_num_attention_heads", None)
        super().__init__(config, *args, **kwargs)


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama's layers; those listed in ``no_rope_layers`` with 0 do not rotate."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layers = cast("Any", self.model).layers
        for layer, rotated in zip(layers, config.no_rope_layers, strict=True):
            if not rotated:
                layer.self_attn.rotary_emb = _Unrotated()


EntryClass = [SeedOssForCausalLM, SmolLM3ForCausalLM]
