"""``override_transformer_config``: the allowed fields, and that Megatron gets them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PretrainedConfig

from mppo.hub.builtin import read_model_config, resolve_model
from mppo.models.configuration import fields_set, transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.overrides import (
    ARCHITECTURE,
    DECIDED,
    OTHER_NAMES,
    override_issues,
    transformer_fields,
)
from mppo.parallel.layout import Layout
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.megatron import MegatronConfig

MAY_CHANGE = {
    "use_cpu_initialization", "moe_grouped_gemm", "attention_backend",
    "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion",
    "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm", "recompute_method",
    "recompute_num_layers", "moe_permute_fusion", "batch_p2p_sync",
}  # fmt: skip
"""Fields that mppo sets and a recipe may change: they do not change the model's function."""


def read(name: str) -> PretrainedConfig:
    return read_model_config(resolve_model(f"builtin:{name}"))


def build(hf_config, **overrides):
    megatron = MegatronConfig(override_transformer_config=overrides)
    return transformer_config(family_config(hf_config), megatron, Layout(1), torch.float32)


def refused(hf_config, overrides, **keys) -> set[str]:
    role = load_recipe(None, ["data.task=arithmetic"]).roles()[0]
    megatron = MegatronConfig(override_transformer_config=overrides, **keys)
    faults = override_issues(replace(role, megatron=megatron), hf_config)
    return {fault.key.rsplit(".", 1)[1] for fault in faults}


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-moonlight"])
def test_every_field_is_refused_or_known_to_be_harmless(name):
    hf_config = read(name)
    given = fields_set(family_config(hf_config), MegatronConfig(), Layout(1), torch.float32)
    assert given.keys() - refused(hf_config, given) <= MAY_CHANGE


def test_every_listed_field_exists_in_megatron():
    named = ARCHITECTURE | DECIDED.keys() | OTHER_NAMES.keys()
    assert named <= transformer_fields(is_mla=True)


def test_a_field_that_changes_how_a_model_is_computed_is_passed_on():
    hf_config, overrides = read("tiny"), {"attention_softmax_in_fp32": False}
    assert refused(hf_config, overrides) == set()
    assert build(hf_config).attention_softmax_in_fp32
    assert not build(hf_config, **overrides).attention_softmax_in_fp32


@pytest.mark.parametrize("modules", [["nonsense"], 3])
def test_a_value_that_megatron_rejects_is_an_issue_of_the_recipe(modules):
    hf_config, overrides = read("tiny-moe"), {"recompute_modules": modules}
    assert refused(hf_config, overrides, recompute_granularity="selective") == set()
    with pytest.raises(ConfigError, match=r"megatron\.override_transformer_config"):
        build(hf_config, recompute_granularity="selective", **overrides)
