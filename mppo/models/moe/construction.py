"""The routers and experts of built stages, and how they differ from Megatron's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from mppo.models.moe.router import Router
from mppo.parallel.layout import Layout


def moe_layers(stages: Sequence[GPTModel]) -> Iterator[MoELayer]:
    """The mixture-of-experts blocks of a rank's chunks, in the order of the chunks."""
    for stage in stages:
        for layer in stage.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                yield layer.mlp


def routers(stages: Sequence[GPTModel]) -> list[Router]:
    """The routers of a rank's chunks, in the order of :func:`moe_layers`."""
    found = [layer.router for layer in moe_layers(stages)]
    assert all(isinstance(router, Router) for router in found), "layer_specs replaces the routers"
    return cast("list[Router]", found)


def pass_packing_to_routers(stage: GPTModel) -> None:
    """Set ``Router.packing`` before each forward pass of its layer, recomputation included."""
    for layer in stage.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(_pass_packing, with_kwargs=True)


def _pass_packing(layer, args, kwargs) -> None:
    params = kwargs["packed_seq_params"]
    layer.mlp.router.packing = getattr(params, "packing", params)


def freeze_routers(stage: GPTModel) -> None:
    """Freeze the router weights and the gates of shared experts."""
    for router in routers([stage]):
        router.requires_grad_(False)
    for layer in moe_layers([stage]):
        if layer.use_shared_expert and layer.shared_experts.gate_weight is not None:
            layer.shared_experts.gate_weight.requires_grad_(False)


def reduce_over_expert_data_parallel(stage: GPTModel, layout: Layout) -> None:
    """Make Megatron sum expert gradients over the ranks that hold the same expert shard. With EP =
    1 it would sum them over the dense data-parallel ranks, which is wrong if ETP != TP."""
    if layout.etp == layout.tp:
        return
    for layer in moe_layers([stage]):
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
