"""DeepSeek-V2, V3, Moonlight and GLM-4.7-Flash in SGLang, with the published epsilon of MLA's
inner norms."""

from __future__ import annotations

from typing import Any, cast

from sglang.srt.models import deepseek_v2, glm4_moe_lite
from torch import nn

from mppo.models.families.architectures import MLA_NORM_EPSILON

_INNER_NORMS = (".q_a_layernorm", ".kv_a_layernorm")


class _InnerEpsilon(nn.Module):
    """Sets ``MLA_NORM_EPSILON``, which see, in place of SGLang's ``rms_norm_eps``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, module in self.named_modules():
            if name.endswith(_INNER_NORMS):  # SGLang's kernels read the attribute
                cast("Any", module).variance_epsilon = MLA_NORM_EPSILON


class DeepseekV2ForCausalLM(_InnerEpsilon, deepseek_v2.DeepseekV2ForCausalLM):
    pass


class DeepseekV3ForCausalLM(_InnerEpsilon, deepseek_v2.DeepseekV3ForCausalLM):
    pass


class Glm4MoeLiteForCausalLM(_InnerEpsilon, glm4_moe_lite.Glm4MoeLiteForCausalLM):
    pass


EntryClass = [DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM]
