"""Megatron's TransformerConfig for a role: architecture, layout, precision, recomputation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_model_config

from mppo.models.families.family import FamilyConfig
from mppo.parallel import device
from mppo.parallel.layout import Layout
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.sections.megatron import MegatronConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def finalize_gradients(models, num_tokens, **kwargs) -> None:
    """Reduce gradients without dividing them: losses already carry the global normaliser. Megatron
    would update the routers' expert biases here, before the gradient is known to be finite;
    ``RoleRouting.move_expert_biases`` updates them with the optimizer step instead."""
    config = get_model_config(models[0])
    has_bias = config.moe_router_enable_expert_bias
    config.moe_router_enable_expert_bias = False
    finalize_model_grads(models, None, **kwargs)
    config.moe_router_enable_expert_bias = has_bias


def uses_transformer_engine(family: FamilyConfig) -> bool:
    """Whether Transformer Engine's layers are used; its attention does not support soft-capping."""
    return device.has_transformer_engine() and family.attn_logit_softcap is None


def fused_kernels(family: FamilyConfig, use_te: bool, own_accumulation: bool) -> dict[str, bool]:
    # the fused rotary kernel for packed sequences ignores YaRN's factor on the cosines, Megatron
    # calls its fusion for MLA experimental, and older kernels have no interleaved pairs
    plain_rope = not family.is_mla and family.gpt_kwargs.get("position_embedding_type") != "yarn"
    plain_rope &= not family.transformer_kwargs.get("rotary_interleaved", False)
    return dict(
        # without it, a micro-batch's gradient is rounded to bfloat16 before it is added
        gradient_accumulation_fusion=use_te or own_accumulation,
        # unfused, both wait for the GPU to learn lengths: the one for each sequence, the other
        # for each expert
        apply_rope_fusion=use_te and plain_rope,
        moe_permute_fusion=use_te and "num_moe_experts" in family.transformer_kwargs,
    )


def transformer_config(
    family: FamilyConfig,
    megatron: MegatronConfig,
    layout: Layout,
    dtype: torch.dtype,
    trained: bool = False,
) -> TransformerConfig:
    """Build Megatron's configuration of a role; an MLATransformerConfig for MLA families.

    Losses are summed over micro-batches and data-parallel ranks, not averaged
    (``calculate_per_token_loss``). If ``trained``, Megatron's DDP will hold gradient buffers that
    linear layers add to.

    Raises:
        ConfigError: Megatron rejects ``override_transformer_config``.
    """
    values = fields_set(family, megatron, layout, dtype, trained)
    values.update(megatron.override_transformer_config)
    try:
        config = (MLATransformerConfig if family.is_mla else TransformerConfig)(**values)
    except (TypeError, ValueError, AssertionError) as error:
        if not megatron.override_transformer_config:
            raise
        why = f"Megatron-Core's TransformerConfig rejects it: {error}"
        fix = "correct or remove the field that this message names"
        key = "megatron.override_transformer_config"
        issue = ConfigIssue(key, megatron.override_transformer_config, why, fix)
        raise ConfigError([issue]) from error
    # not fields of Megatron's configuration; this package's modules read them
    vars(config).update(
        offload_activations=megatron.offload_activations,
        attn_logit_softcap=family.attn_logit_softcap,
        mla_norm_epsilon=family.mla_norm_epsilon,
        **family.config_attributes,
    )
    return config


def fields_set(
    family: FamilyConfig,
    megatron: MegatronConfig,
    layout: Layout,
    dtype: torch.dtype,
    trained: bool = False,
) -> dict[str, Any]:
    """The configuration's fields before ``override_transformer_config`` applies."""
    recompute = megatron.recompute_granularity
    use_te = uses_transformer_engine(family)
    fused = fused_kernels(family, use_te, device.accumulates_weight_gradients())
    fused["gradient_accumulation_fusion"] &= trained  # needs DDP's buffers
    values = dict(
        **layout.megatron_sizes(),
        sequence_parallel=megatron.sequence_parallel and layout.tp > 1,
        cp_comm_type=megatron.cp_comm_type if use_te else megatron.key_exchange(family.is_mla),
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        pipeline_model_parallel_layout=_pipeline_chunks(megatron.pipeline_layers),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not device.is_cuda(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_gradients,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type=megatron.moe_token_dispatcher_type,
        # Megatron's auxiliary losses depend on the micro-batches; mppo.models.moe.router computes
        # them over the mini-batch
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_bias_update_rate=megatron.moe_router_bias_update_rate,
        moe_router_dtype=megatron.moe_router_dtype,
        moe_expert_capacity_factor=megatron.moe_expert_capacity_factor,
        moe_grouped_gemm=use_te and "num_moe_experts" in family.transformer_kwargs,
        layernorm_zero_centered_gamma=family.zero_centered_norm,
        attention_backend=AttnBackend.auto if use_te else AttnBackend.local,
        masked_softmax_fusion=False,
        # uncompiled, as on the CPU, Megatron's fusion is slower than the plain operations
        bias_activation_fusion=device.is_cuda()
        and family.transformer_kwargs["activation_func"] is F.silu,
        bias_dropout_fusion=False,
        persist_layer_norm=use_te,
        # interleaving with batched p2p gives wrong gradients; see docs/parallelism.md
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        # each request blocks the current stream only, not the device
        batch_p2p_sync=False,
        # Megatron's interleaved schedule frees an output while its send is under way, and neither
        # gloo nor torch for NCCL keeps the memory, only the tensor: the next one would overwrite it
        deallocate_pipeline_outputs=layout.vpp == 1,
        **fused,
        recompute_granularity=None if recompute == "none" else recompute,
    )
    if recompute == "full":
        values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return values | family.transformer_kwargs


def _pipeline_chunks(layers: tuple[int, ...] | None) -> list[list[str]] | None:
    if layers is None:
        return None
    chunks = [["decoder"] * count for count in layers]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks
