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
