"""Names that Megatron-Core 0.16.1 uses but defines only where Transformer Engine is installed.

Without them every mixture of experts fails in its router, and every MLA model while it is built, on
any device.
"""

from __future__ import annotations

import importlib


def install() -> None:
    """Define the missing names. Idempotent; changes nothing where Transformer Engine is installed.

    ``moe_utils.te_general_gemm`` becomes None, which the router's own code reads as "absent".
    ``multi_latent_attention.TELinear`` becomes a class without instances, because an
    ``isinstance`` check reads it.
    """
    moe_utils = vars(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
    moe_utils.setdefault("te_general_gemm", None)
    attention = vars(importlib.import_module("megatron.core.transformer.multi_latent_attention"))
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(attention.get(name), type):
            attention[name] = type(name, (), {})
