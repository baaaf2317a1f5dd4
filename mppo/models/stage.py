"""One pipeline chunk of a role's model: Megatron's GPTModel, ending in hidden states.

With Transformer Engine the layers are Transformer Engine's; without it they are Megatron's local
ones with the core attention, norm and rotary angles of this package.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from mppo.models.attention.core import PackedAttention
from mppo.models.attention.mla import LocalMLA, PublishedMLA
from mppo.models.attention.packed_sequences import Packing
from mppo.models.attention.rotary import PackedRotary
from mppo.models.configuration import uses_transformer_engine
from mppo.models.families.family import FamilyConfig
from mppo.models.families.layers import LastLayer, ParallelLayer, SandwichLayer, with_early_select
from mppo.models.heads.value_head import ValueHead
from mppo.models.microbatch import MicroBatch
from mppo.models.moe.experts import SortedExperts
from mppo.models.moe.router import Router, pass_packing_to_routers, reduce_over_expert_data_parallel
from mppo.models.norm import NORMS
from mppo.models.offload import offloaded_activations
from mppo.parallel import device
from mppo.parallel.host_copies import host_copier
from mppo.parallel.layout import Layout
from mppo.recipe.sections.role_config import Head
from mppo.supervision.phase import tick


class Stage(GPTModel):
    """A chunk of the model; the last one ends in normalised hidden states, and holds
    ``output_layer`` or ``value_head``, which ``mppo.models.heads`` applies to some tokens."""

    def __init__(
        self, *args, head: Head, family: FamilyConfig, value_bins: int = 1, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        self.head = head
        self.uses_transformer_engine = uses_transformer_engine(family)
        self.embedding_scale = family.embedding_scale
        self.final_logit_softcap = family.final_logit_softcap
        self.position_offset = family.position_offset
        if self.pre_process and self.embedding.add_position_embedding:
            self.embedding.position_embeddings.to(self.config.params_dtype)  # Megatron: float32
        if head == "value" and self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config, value_bins)

    def _preprocess(self, *args, **kwargs):
        out = super()._preprocess(*args, **kwargs)
        if self.embedding_scale is None or not self.pre_process:
            return out
        scale = torch.tensor(self.embedding_scale, dtype=out[0].dtype)
        return (out[0] * scale, *out[1:])

    def _postprocess(self, hidden_states: Tensor, **kwargs) -> Tensor:
        return hidden_states

    @property
    def selects_early(self) -> bool:
        """Whether the output holds only the tokens that the head uses: ``[N, 1, hidden]``."""
        return isinstance(self.decoder.layers[-1], LastLayer)

    def output_weight(self) -> Tensor:
        """This rank's rows of the vocabulary projection, ``[V / tp, hidden]``; last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "untied projections have a weight of their own"
        return weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """``GPTModel``'s, without the output layer that a value model's last chunk lacks."""
        if self.head == "policy" or not self.post_process:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def forward_packed(self, tokens_T: Tensor, packing: Packing) -> Tensor:
        """Run the chunk over a micro-batch of int64 tokens ``[T]``; return its hidden states
        ``[T, 1, hidden]``, ``[T / tp, 1, hidden]`` under sequence parallelism, and of the last
        chunk, where it ``selects_early``, ``[N, 1, hidden]``."""
        params = _as_thd(packing) if self.uses_transformer_engine else packing
        # set by transformer_config
        offload = vars(self.config)["offload_activations"] and torch.is_grad_enabled()
        moved = nullcontext()
        if offload:
            moved = offloaded_activations(self, host_copier(tokens_T.device))
        with moved:
            positions = packing.positions + self.position_offset
            return self(tokens_T[None], positions[None], None, packed_seq_params=params)


class _PackedTHD(PackedSeqParams):
    """A packing in Transformer Engine's format, with the original for this package's modules."""

    packing: Packing


def _as_thd(packing: Packing) -> _PackedTHD:
    names = [f.name for f in dataclasses.fields(PackedSeqParams)]
    values = {name: getattr(packing, name) for name in names}
    params = _PackedTHD(**{**values, "qkv_format": "thd"})
    params.packing = packing
    return params


def build_stages(
    family: FamilyConfig,
    config: TransformerConfig,
    layout: Layout,
    padded_vocab: int,
    pipeline_rank: int,
    head: Head,
    value_bins: int = 1,
) -> list[Stage]:
    """Build this rank's ``layout.vpp`` chunks in virtual-stage order, on its device, with
    Megatron's initial weights. The layout's groups must be active."""
    stages = []
    for chunk in range(layout.vpp):
        vp_stage = chunk if layout.vpp > 1 else None
        first = pipeline_rank == 0 and chunk == 0
        last = pipeline_rank == layout.pp - 1 and chunk == layout.vpp - 1
        gpt_kwargs = {k: v for k, v in family.gpt_kwargs.items() if k != "vocab_size"}
        if head == "value":
            gpt_kwargs["share_embeddings_and_output_weights"] = False
        stage = Stage(
            config,
            layer_specs(config, vp_stage, family, last),
            vocab_size=padded_vocab,
            pre_process=first,
            post_process=last,
            vp_stage=vp_stage,
            head=head,
            value_bins=value_bins,
            family=family,
            **gpt_kwargs,
        )
        if not stage.uses_transformer_engine:
            _pack_rotary(stage)
        pass_packing_to_routers(stage)
        reduce_over_expert_data_parallel(stage, layout)
        stages.append(stage.to(device=device.device()))
    return stages


def layer_specs(
    config: TransformerConfig, vp_stage: int | None, family: FamilyConfig, last: bool
) -> TransformerBlockSubmodules:
    """Megatron's layer specs for one chunk, with this package's modules in place of some."""
    use_te = uses_transformer_engine(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        specs = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, vp_stage=vp_stage)
    local = {**_LOCAL_REPLACEMENTS, WrappedTorchNorm: NORMS[config.normalization]}
    specs = _replace_modules(specs, _REPLACEMENTS if use_te else local)
    assert isinstance(specs, TransformerBlockSubmodules)
    layers = specs.layer_specs or []
    special = {SandwichLayer: family.sandwich_norms, ParallelLayer: family.parallel_residual}
    for module in (module for module, wanted in special.items() if wanted):
        layers = [dataclasses.replace(layer, module=module) for layer in layers]
    if last:
        layers = with_early_select(layers, config)
    return dataclasses.replace(specs, layer_specs=layers)


_REPLACEMENTS: dict[type, type] = {TopKRouter: Router, MLASelfAttention: PublishedMLA}
"""This package's modules by Megatron's, with and without Transformer Engine."""

_LOCAL_REPLACEMENTS: dict[type, type] = {
    **_REPLACEMENTS,
    SequentialMLP: SortedExperts,
    DotProductAttention: PackedAttention,
    MLASelfAttention: LocalMLA,
}
"""The same without Transformer Engine, besides norms."""


def _replace_modules(spec: object, replacements: dict[type, type]) -> object:
    """``spec`` with the modules replaced; Apex's fused norm counts as ``WrappedTorchNorm``."""
    if isinstance(spec, type):
        if spec.__name__ == "FusedLayerNorm":
            return replacements.get(WrappedTorchNorm, spec)
        return replacements.get(spec, spec)
    if isinstance(spec, list):
        return [_replace_modules(part, replacements) for part in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        # ModuleSpec's params and metainfo are plain values
        names = [f.name for f in dataclasses.fields(spec)]
        if isinstance(spec, ModuleSpec):
            names = ["module", "submodules"]
        changed = {name: _replace_modules(getattr(spec, name), replacements) for name in names}
        return dataclasses.replace(spec, **changed)
    return spec


def _pack_rotary(stage: Stage) -> None:
    """Wrap the chunk's rotary embedding; MLA has one per layer instead (``PublishedMLA``)."""
    inner = getattr(stage, "rotary_pos_emb", None)
    if inner is not None:
        stage.add_module("rotary_pos_emb", PackedRotary(inner, per_token_dims=2))


def run_chunk(chunk: torch.nn.Module, microbatch: MicroBatch) -> Tensor:
    stage = cast("Stage", chunk.module if hasattr(chunk, "ddp_config") else chunk)
    output = stage.forward_packed(microbatch.tokens_t, microbatch.packing)
    # Megatron's block would hold the received input, and later its gradient, until the next pass
    stage.decoder.set_input_tensor(cast("Tensor", None))
    return output


def forward_step_function(
    finish: Callable[[Tensor, MicroBatch], Any],
    objective: Callable[[Any, tuple[int, ...]], tuple[Tensor, Any]] | None,
) -> Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[Tensor, Callable]]:
    """Make the ``forward_step_func`` of Megatron's passes. ``finish`` computes a micro-batch's
    outputs from those of the model's last chunk; ``objective`` None: forward only."""

    def forward_step(iterator: Iterator[MicroBatch], chunk: torch.nn.Module):
        microbatch = next(iterator)
        tick()
        output = run_chunk(chunk, microbatch)

        def loss_func(hidden: Tensor, non_loss_data: bool = False):
            outputs = finish(hidden, microbatch)
            if objective is None:
                return outputs
            loss, stats = objective(outputs, microbatch.indices)
            # three values and calculate_per_token_loss: Megatron does not scale the loss
            return loss, torch.ones((), dtype=torch.int), (loss.detach(), stats)

        return output, loss_func

    return forward_step
