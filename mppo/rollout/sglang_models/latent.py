"""DeepSeek-V2, V3, Moonlight and GLM-4.7-Flash in SGLang, with the published epsilon of MLA's
inner norms."""

from __future__ import annotations

from typing import Any, cast

from sglang.srt.models import deepseek_v2, glm4_moe_lite
from torch import nn

from mppo.models.families.architectures import MLA_NORM_EPSILON

_INNER_NORMS = (".q_a_layernorm", ".kv_a_layernorm")


def _set_inner_epsilon(model: nn.Module) -> None:
    """Replace SGLang's ``rms_norm_eps`` in these norms; its kernels read the attribute set here."""
    for name, module in model.named_modules():
        if name.endswith(_INNER_NORMS):
            cast("Any", module).variance_epsilon = MLA_NORM_EPSILON


class DeepseekV2ForCausalLM(deepseek_v2.DeepseekV2ForCausalLM):
    """See ``mppo.models.families.architectures.MLA_NORM_EPSILON``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_inner_epsilon(self)


class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):
    """See ``mppo.models.families.architectures.MLA_NORM_EPSILON``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_inner_epsilon(self)


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    """See ``mppo.models.families.architectures.MLA_NORM_EPSILON``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_inner_epsilon(self)


EntryClass = [DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM]
