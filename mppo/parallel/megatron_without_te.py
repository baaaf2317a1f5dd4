"""Names that Megatron-Core 0.16.1 uses but defines only where Transformer Engine is installed.

Without these names, the router of every mixture of experts fails, and no MLA model can be built, on
any device.
"""

from __future__ import annotations

import importlib


def install() -> None:
    """Define the missing names. Idempotent; changes nothing where Transformer Engine is installed.
    ``moe_utils.te_general_gemm`` becomes None, which the router's code treats as absent.
    ``TELinear`` and ``TEColumnParallelLinear`` of ``multi_latent_attention`` become classes without
    instances, because ``isinstance`` checks use them."""
    moe_utils = vars(importlib.import_module("megatron.core.transformer.moe.moe_utils"))
    moe_utils.setdefault("te_general_gemm", None)
    attention = vars(importlib.import_module("megatron.core.transformer.multi_latent_attention"))
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(attention.get(name), type):
            attention[name] = type(name, (), {})
