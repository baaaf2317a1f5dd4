"""The last layer of a model: it selects the tokens that predict a response before its MLP."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LastLayer(TransformerLayer):
    """Megatron's layer, whose feed-forward network sees only the tokens whose
    outputs the head uses.

    Attention runs over all tokens; the output is ``[N, 1, hidden]`` where the packing says which N
    tokens those are (``logits_to_keep``).
    """

    def _forward_attention(self, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        hidden, context = super()._forward_attention(*args, **kwargs)
        params = kwargs["packed_seq_params"]
        packing = getattr(params, "packing", params)
        if packing.logits_to_keep is not None:
            hidden = hidden.index_select(0, packing.logits_to_keep)
        return hidden, context


def with_early_select(layers: list[ModuleSpec], config: TransformerConfig) -> list[ModuleSpec]:
    """The layer specs of a model's last chunk, the last one a :class:`LastLayer` where it can be.

    It stays as it is in a mixture of experts, whose routing counts all tokens; with another layer
    class (Gemma 2); and under sequence parallelism, where ranks must hold equally many tokens.
    """
    if not layers or config.sequence_parallel or layers[-1].module is not TransformerLayer:
        return layers
    if layers[-1].submodules.mlp.module is MoELayer:
        return layers
    return [*layers[:-1], dataclasses.replace(layers[-1], module=LastLayer)]
