"""What a mixture of experts needs beyond Megatron's own construction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from mppo.parallel.layout import Layout


def moe_layers(stages: Sequence[torch.nn.Module]) -> Iterator[MoELayer]:
    """The mixture-of-experts blocks of a rank's chunks, in layer order."""
    for stage in stages:
        for layer in stage.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                yield layer.mlp


def hand_packing_to_routers(stage: torch.nn.Module) -> None:
    """Let every router see the packing its layer is called with, in recomputation too."""
    for layer in stage.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(_hand_packing, with_kwargs=True)


def _hand_packing(layer, args, kwargs) -> None:
    params = kwargs["packed_seq_params"]
    layer.mlp.router.packing = getattr(params, "packing", params)


def freeze_routers(stage: torch.nn.Module) -> None:
    """Keep router weights, and gates of shared experts, as they are."""
    for layer in moe_layers([stage]):
        layer.router.requires_grad_(False)
        if layer.use_shared_expert and layer.shared_experts.gate_weight is not None:
            layer.shared_experts.gate_weight.requires_grad_(False)


def reduce_over_expert_data_parallel(stage: torch.nn.Module, layout: Layout) -> None:
    """Have expert gradients summed over the ranks that hold the same expert shard.

    Megatron does so only where EP > 1. With EP = 1 it sums them over the dense data-parallel ranks,
    which is wrong as soon as experts are not split over TP as dense layers are (ETP != TP).
    """
    if layout.etp == layout.tp:
        return
    for layer in moe_layers([stage]):
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
