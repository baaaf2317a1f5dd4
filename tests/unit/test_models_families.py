"""Families: Hugging Face configs become Megatron's, or are refused with a reason."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
import transformers as hf
from hf_families import BASE, CONFIGS, EXPERTS, LATENT, LATENT_YARN, LLAMA3, PLAIN, YARN

from mppo.models.families.activations import gelu_tanh
from mppo.models.families.architectures import BUILDERS, family_config
from mppo.weights.shape import FAMILIES, model_shape


def llama(**config):
    return hf.LlamaConfig(**{**BASE, **config})


def deepseek(kind, **config):
    routed = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": kind == "V3",
    }  # fmt: skip
    return getattr(hf, f"Deepseek{kind}Config")(**{**LATENT, **routed, **config})


def test_every_family_has_a_builder_and_a_fixture():
    assert set(BUILDERS) == set(FAMILIES)
    assert {build().model_type for build in CONFIGS.values()} == set(FAMILIES)


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
    assert (family.window_size, family.window_layers) == (8, (True, False, True, False))
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
