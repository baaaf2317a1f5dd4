"""A worker that loads a checkpoint with megatron.core only; imports nothing of this project."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8,
}  # fmt: skip
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "kv_channels": 12,
    "moe_layer_freq": [1] * 4, "qk_layernorm": True,
}  # fmt: skip
LAYOUTS = {"TP2": {"tp": 2}, "PP2": {"pp": 2}, "EP2": {"ep": 2}}
VOCABULARY = 102


def load(rank: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    """Load every (model, layout) on two ranks; write this rank's tensors to ``got-<rank>.pt``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo", f"file://{folder}/plain", rank=rank, world_size=2)
    got = {}
    for model, layout in cases:
        sizes = LAYOUTS[layout]
        parallel_state.initialize_model_parallel(
            sizes.get("tp", 1), sizes.get("pp", 1), expert_model_parallel_size=sizes.get("ep", 1)
        )
        built = plain_model(model, sizes)
        state, release = {"model": built.sharded_state_dict()}, f"{folder}/{model}_megatron/release"
        common = dist_checkpointing.load_common_state_dict(release)
        loaded = dist_checkpointing.load(state, release)
        built.load_state_dict(loaded["model"])
        first = built.decoder.layers[0].layer_number - 1
        got[model, layout] = (first, {k: v.clone() for k, v in built.named_parameters()})
        got[model] = common["checkpoint_version"], vars(common["args"])
        parallel_state.destroy_model_parallel()
    torch.save(got, folder / f"got-{rank}.pt")
    dist.destroy_process_group()


def plain_model(model: str, sizes: dict[str, int]) -> torch.nn.Module:
    """Megatron's GPTModel of local layers, full of NaNs."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        **{**SIZES, **(EXPERTS if model == "qwen3_moe" else {})},
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    built = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    for parameter in built.parameters():
        parameter.data.fill_(torch.nan)
    return built
