"""Families: Hugging Face configs become Megatron's, or are refused with a reason."""

from __future__ import annotations

import json

import pytest
import torch.nn.functional as F
import transformers as hf
from hf_families import BASE, CONFIGS, EXPERTS, LATENT, LATENT_YARN, LLAMA3, PLAIN, YARN

from mppo import register
from mppo.hub.builtin import read_model_config
from mppo.models.families.architectures import family_config
from mppo.models.families.architectures import llama as build_llama
from mppo.models.families.family import gelu_tanh
from mppo.recipe.load import load_recipe
from mppo.recipe.model_shape import check_model_type, model_shape
from mppo.rollout.sglang.model_support import engine_issues
from mppo.weights.load_stages import is_extra_layer
from mppo.weights.names import HFNames, hf_names


def llama(**config):
    return hf.LlamaConfig(**{**BASE, **config})


def deepseek(kind, **config):
    routed = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": kind == "V3",
    }  # fmt: skip
    return getattr(hf, f"Deepseek{kind}Config")(**{**LATENT, **routed, **config})


def test_every_family_has_a_builder_and_a_fixture():
    assert register.family.keys() >= set(register.family.own)
    assert {build().model_type for build in CONFIGS.values()} == set(register.family.own)


def test_a_family_of_a_plugin_has_what_it_states():
    names = HFNames(layer="blocks.{l}.")
    given = {"like": "qwen3", "names": names, "sizes": lambda hf_config: {"qk_norm": False}}
    own = llama()
    own.model_type = "mine"
    with pytest.raises(ValueError, match="model_type = 'mine': this family is not supported"):
        model_shape(own)
    try:
        register.family("mine", **given)(lambda hf_config, shape: build_llama(hf_config, shape))
        shape = model_shape(own)
        assert (shape.like, shape.model_type, shape.qk_norm) == ("qwen3", "mine", False)
        assert hf_names("mine") == names
        assert family_config(own).model_type == "mine"
        (issue,) = engine_issues(load_recipe(None, ["rollout.name=sglang"]), own, on_cpu=True)
        assert issue.why == "its plugin does not say what SGLang supports in a mine"
        register.family.drop(__name__)
        register.family("mine")(lambda hf_config, shape: shape)
        with pytest.raises(ValueError, match="returned ModelShape; return a FamilyConfig"):
            family_config(own)
    finally:
        register.family.drop(__name__)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_become_fields_megatron_has(name):
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    family = family_config(CONFIGS[name]())
    known = {f.name for f in fields(MLATransformerConfig if family.is_mla else TransformerConfig)}
    assert set(family.transformer_kwargs) <= known
    assert not set(family.config_attributes) & known


def test_llama_fields():
    kwargs = family_config(llama(head_dim=None)).transformer_kwargs
    assert kwargs["kv_channels"] == 16
    assert kwargs["num_query_groups"] == 2
    assert kwargs["activation_func"] is F.silu
    assert not kwargs["add_qkv_bias"]


def test_gemma_fields():
    family = family_config(CONFIGS["gemma2"]())
    assert family.embedding_scale == 8.0
    assert family.zero_centered_norm
    assert family.sandwich_norms
    assert family.transformer_kwargs["softmax_scale"] == 24**-0.5
    assert family.transformer_kwargs["activation_func"] is gelu_tanh
    assert family.layer_windows == (8, None, 8, None)
    assert family.transformer_kwargs["window_size"] == (7, 0)
    assert (family.attn_logit_softcap, family.final_logit_softcap) == (5.0, 3.0)


def test_dense_and_sparse_layers_follow_the_config():
    config = hf.Qwen3MoeConfig(**BASE, **EXPERTS, mlp_only_layers=[0], decoder_sparse_step=2)
    assert model_shape(config).sparse_layers == (False, True, False, True)
    assert model_shape(CONFIGS["moonlight"]()).sparse_layers == (False, True, True, True)


def test_rope_settings_from_before_transformers_5_are_read():
    class Old:
        model_type = "qwen2"
        rope_theta = 1e6
        rope_scaling = {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_theta"}}  # noqa: RUF012

        def __init__(self):
            for key, value in BASE.items():
                setattr(self, key, value)
            self.hidden_act = "silu"

    family = family_config(Old())
    assert family.gpt_kwargs["rotary_base"] == 1e6
    assert family.gpt_kwargs["position_embedding_type"] == "yarn"
    assert family.config_attributes["yarn_rotary_scaling_factor"] == 4.0


def test_stated_attention_factor_is_what_megatron_multiplies_by():
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor,
    )

    rope = {**YARN, "attention_factor": 1.25}
    attributes = family_config(hf.Qwen2Config(**BASE, rope_parameters=rope)).config_attributes
    got = _yarn_get_concentration_factor(
        attributes["yarn_rotary_scaling_factor"],
        attributes["yarn_mscale"],
        attributes["yarn_mscale_all_dim"],
    )
    assert got == pytest.approx(1.25)


REFUSED = {
    "unknown family": (lambda: hf.GPT2Config(), "model_type = 'gpt2'"),
    "gpt-oss": (lambda: hf.GptOssConfig(), "model_type = 'gpt_oss': .* learned sink per head"),
    "Qwen3-Next": (lambda: hf.Qwen3NextConfig(), "'qwen3_next': .* gated delta nets"),
    "Qwen3.5": (lambda: hf.Qwen3_5TextConfig(), "'qwen3_5_text': .* gated delta nets"),
    "Qwen3.5 MoE": (lambda: hf.Qwen3_5MoeTextConfig(), "'qwen3_5_moe_text': .* gated delta nets"),
    "GLM-5": (lambda: hf.GlmMoeDsaConfig(), "'glm_moe_dsa': an indexer"),
    "Gemma 3": (lambda: hf.Gemma3TextConfig(), "'gemma3_text': .* different bases"),
    "Olmo 3": (lambda: hf.Olmo3Config(), "'olmo3': it norms queries and keys over all heads"),
    "Ministral 3": (lambda: hf.Ministral3Config(), "'ministral3': queries are scaled"),
    "Phi-4": (lambda: hf.Phi3Config(), "'phi3': one tensor holds all queries"),
    "Seed-OSS without biases": (
        lambda: hf.SeedOssConfig(**BASE, attention_bias=False), "attention_bias = False"
    ),
    "Seed-OSS with an output bias": (
        lambda: hf.SeedOssConfig(**BASE, attention_out_bias=True), "attention_out_bias = True"
    ),
    "SmolLM3 with an entry too many": (
        lambda: hf.SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1, 1, 1], pad_token_id=None),
        "no_rope_layers",
    ),
    "GLM-4.7-Flash with dense layers later": (
        lambda: hf.Glm4MoeLiteConfig(**LATENT, mlp_layer_types=["sparse", "dense"] * 2),
        "mlp_layer_types",
    ),
    "llama-3 rope with other constants": (
        lambda: llama(rope_parameters={**LLAMA3, "original_max_position_embeddings": 4096}),
        "original_max_position_embeddings = 4096.*8192",
    ),
    "dynamic rope": (
        lambda: llama(rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}),
        "rope_type = 'dynamic'",
    ),
    "attention bias": (lambda: llama(attention_bias=True), "attention_bias = True"),
    "activation": (lambda: llama(hidden_act="tanh"), "hidden_act = 'tanh'"),
    "uneven heads": (lambda: llama(num_key_value_heads=3), "num_key_value_heads = 3"),
    "other quantisation": (
        lambda: llama(quantization_config={"quant_method": "gptq"}), "quantization_config",
    ),
    "V2 group routing": (
        lambda: deepseek("V2", topk_method="group_limited_greedy", n_group=4, topk_group=2),
        "topk_method = 'group_limited_greedy'",
    ),
    "V3 groups of another depth": (
        lambda: deepseek("V3", n_group=4, topk_group=2, num_experts_per_tok=2), "topk_group = 2",
    ),
    "V3 without renormalisation": (
        lambda: deepseek("V3", norm_topk_prob=False), "norm_topk_prob = False",
    ),
    "latent llama-3 rope": (
        lambda: deepseek("V3", rope_parameters=LLAMA3), "rope_type = 'llama3'",
    ),
    "one of two mscales": (
        lambda: deepseek("V3", rope_parameters={**LATENT_YARN, "mscale": None}), "mscale",
    ),
    "the other alone": (
        lambda: deepseek("V3", rope_parameters={**YARN, "mscale": 0.7}), "mscale = 0.7.*both",
    ),
    "one renormalised expert": (
        lambda: hf.Qwen3MoeConfig(
            **BASE, **{**EXPERTS, "num_experts_per_tok": 1}, norm_topk_prob=True
        ),
        "num_experts_per_tok = 1",
    ),
    "another family's partial rotation": (
        lambda: llama(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor = 0.5",
    ),
    "partial rotation with yarn": (
        lambda: hf.GPTNeoXConfig(**PLAIN, rope_parameters={**YARN, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor = 0.5",
    ),
    "gpt-neox without attention's biases": (
        lambda: hf.GPTNeoXConfig(**PLAIN, attention_bias=False), "attention_bias = False"
    ),
    "opt without biases": (lambda: hf.OPTConfig(**PLAIN, enable_bias=False), "enable_bias"),
    "opt-350m's norms": (
        lambda: hf.OPTConfig(**PLAIN, do_layer_norm_before=False), "do_layer_norm_before = False"
    ),
    "opt-350m's embeddings": (
        lambda: hf.OPTConfig(**PLAIN, word_embed_proj_dim=32), "word_embed_proj_dim = 32.*width 64"
    ),
    "opt without the final norm": (
        lambda: hf.OPTConfig(**PLAIN, _remove_final_layer_norm=True), "_remove_final_layer_norm"
    ),
    "opt's norms without weights": (
        lambda: hf.OPTConfig(**PLAIN, layer_norm_elementwise_affine=False),
        "layer_norm_elementwise_affine",
    ),
    "more chosen than there are": (
        lambda: hf.MixtralConfig(**BASE, num_local_experts=2, num_experts_per_tok=3),
        "only 2 experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_megatron_cannot_represent_are_refused(case):
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        family_config(build())


KIMI_K2 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "vocab_size": 163840, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
"""config.json of moonshotai/Kimi-K2-Instruct of July 2025."""


def test_kimi_k2_is_read_once_its_type_is_deepseek_v3(tmp_path):
    write = (tmp_path / "config.json").write_text
    write(json.dumps(KIMI_K2 | {"model_type": "kimi_k2", "auto_map": {}}))
    with pytest.raises(ValueError, match=r"'kimi_k2': .*; set it to deepseek_v3 in config.json"):
        read_model_config(tmp_path)
    write(json.dumps(KIMI_K2 | {"model_type": "deepseek_v3"}))
    kwargs = family_config(read_model_config(tmp_path)).transformer_kwargs
    assert (kwargs["num_moe_experts"], kwargs["rotary_scaling_factor"]) == (384, 32.0)
    assert kwargs["moe_layer_freq"] == [0] + [1] * 60


def test_mimo_is_qwen2_with_a_layer_that_predicts_more_tokens():
    config = hf.Qwen2Config(**BASE, attention_bias=True, head_dim=32, num_nextn_predict_layers=1)
    shape = model_shape(config)
    assert family_config(config).transformer_kwargs["add_qkv_bias"]
    assert is_extra_layer("model.mtp_layers.0.input_proj.weight", shape)
    assert not is_extra_layer("model.mtp_layers.1.input_proj.weight", shape)
    with pytest.raises(ValueError, match=r"'mimo': .*; set it to qwen2"):
        check_model_type("mimo")
