"""What a converted checkpoint tells Megatron-LM and Megatron-Bridge about the model."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import yaml
from hf_families import CONFIGS, save
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from checkpoints_convert.__main__ import main
from checkpoints_convert.common_state import common_state, megatron_arguments
from checkpoints_convert.run_config import run_config
from mppo.models.families.architectures import family_config

READ_BY_MEGATRON_LM = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads",
    "num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings",
    "position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings",
    "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "squared_relu",
    "swiglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p", "normalization",
    "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout", "num_experts",
    "moe_layer_freq", "padded_vocab_size", "ckpt_format", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
"""Of every GPT model, by ``load_args_from_checkpoint`` of Megatron-LM's
``megatron/training/checkpointing.py``, commit d98e8a64 (2026-08-22)."""
READ_OF_EXPERTS = ("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")
READ_OF_SIGMOID_ROUTERS = (
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
)  # fmt: skip
NOT_PLAIN = ("gemma", "gemma2", "gpt_neox", "opt", "glm4")


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_lm_finds_every_argument(name: str) -> None:
    config = CONFIGS[name]()
    arguments = vars(common_state(config)["args"])
    assert set(READ_BY_MEGATRON_LM) <= set(arguments)
    if arguments["num_experts"]:
        assert set(READ_OF_EXPERTS) <= set(arguments)
    if family_config(config).transformer_kwargs.get("moe_router_score_function"):
        assert set(READ_OF_SIGMOID_ROUTERS) <= set(arguments)
    assert arguments["seq_length"] >= config.max_position_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_the_arguments_make_megatrons_configuration(name: str) -> None:
    """As Megatron-LM makes it: each field that is an argument, and the renamed ones."""
    family, arguments = family_config(CONFIGS[name]()), megatron_arguments(CONFIGS[name]())
    kind = MLATransformerConfig if family.is_mla else TransformerConfig
    found = {f.name: arguments[f.name] for f in fields(kind) if f.name in arguments}
    found |= {
        "num_moe_experts": arguments["num_experts"],
        "layernorm_epsilon": arguments["norm_epsilon"],
        "gated_linear_unit": arguments["swiglu"] or family.activation != "silu",
    }
    wanted = dict(family.transformer_kwargs)
    wanted.pop("activation_func")
    if not arguments["swiglu"]:
        wanted.pop("gated_linear_unit")
    assert {key: found[key] for key in wanted} == wanted
    kind(**found)


def test_positions_are_megatron_lms_arguments() -> None:
    yarn = megatron_arguments(CONFIGS["qwen2_yarn"]())
    assert (yarn["position_embedding_type"], yarn["rotary_base"]) == ("yarn", 1e6)
    assert (yarn["rotary_scaling_factor"], yarn["yarn_original_max_position_embeddings"]) == (4, 64)
    llama3 = megatron_arguments(CONFIGS["llama3_rope"]())
    assert (llama3["use_rope_scaling"], llama3["rope_scaling_factor"]) == (True, 8.0)
    assert megatron_arguments(CONFIGS["llama_linear"]())["rotary_seq_len_interpolation_factor"] == 2
    assert megatron_arguments(CONFIGS["glm4_moe"]())["rotary_percent"] == 0.5
    assert megatron_arguments(CONFIGS["smollm3"]())["no_rope_freq"] == [0, 1, 0, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_bridge_gets_fields_that_megatron_has(name: str) -> None:
    content = run_config(CONFIGS[name](), torch.bfloat16)
    if name in NOT_PLAIN:
        assert content is None
        return
    assert content is not None
    model = content["model"]
    family = family_config(CONFIGS[name]())
    assert model["_target_"].endswith(".MLAModelProvider" if family.is_mla else ".GPTModelProvider")
    known = {f.name for f in fields(MLATransformerConfig if family.is_mla else TransformerConfig)}
    assert set(model) - known - {k for k in model if k.startswith("yarn_")} <= OF_THE_PROVIDER
    assert ("transformer_layer_spec" in model) == bool(model.get("num_moe_experts"))
    assert yaml.safe_load(yaml.safe_dump(content)) == content


OF_THE_PROVIDER = {
    "_target_", "transformer_layer_spec", "vocab_size", "share_embeddings_and_output_weights",
    "position_embedding_type", "rotary_base", "rotary_percent", "rope_scaling",
    "rope_scaling_factor", "seq_len_interpolation_factor", "seq_length",
}  # fmt: skip
"""Fields of ``GPTModelProvider`` (Megatron-Bridge's ``models/gpt_provider.py``, commit 067f987d)
besides those of Megatron's configuration and ``yarn_*``."""


def test_a_conversion_writes_both(tmp_path) -> None:
    save("llama", tmp_path / "hf", torch.bfloat16)
    paths = ["--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "megatron")]
    assert main(["hf-to-megatron", "--no-tokenizer", *paths]) == 0
    release = tmp_path / "megatron" / "release"
    model = yaml.safe_load((release / "run_config.yaml").read_text())["model"]
    assert (model["num_layers"], model["hidden_size"], model["bf16"]) == (4, 64, True)
    common = torch.load(release / "common.pt", weights_only=False)
    assert common["args"].num_layers == 4
