"""Which models' last layer computes only the tokens that the head reads."""

from __future__ import annotations

import dataclasses

import torch
from hf_families import CONFIGS
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_layer import TransformerLayer

from mppo.models.configuration import transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.families.layers import LastLayer, SandwichLayer, with_early_select
from mppo.recipe.sections.megatron import MegatronConfig


def layers_of(spec, **layout) -> list[type]:
    """Classes of the layers of a model of two such layers."""
    megatron = MegatronConfig(**layout)
    place = megatron.layout(megatron.tensor_model_parallel_size)
    family = family_config(CONFIGS["llama"]())
    config = transformer_config(family, megatron, place, torch.float32)
    return [layer.module for layer in with_early_select([spec, spec], config)]


def test_a_dense_models_last_layer_computes_only_tokens_that_the_head_reads():
    assert layers_of(get_gpt_layer_local_spec()) == [TransformerLayer, LastLayer]


def test_a_layer_with_experts_computes_all_tokens():
    assert LastLayer not in layers_of(get_gpt_layer_local_spec(num_experts=4))


def test_other_layers_are_not_changed():
    sandwich = dataclasses.replace(get_gpt_layer_local_spec(), module=SandwichLayer)
    assert layers_of(sandwich) == [SandwichLayer, SandwichLayer]


def test_under_sequence_parallelism_ranks_hold_equally_many_tokens():
    spec, split = get_gpt_layer_local_spec(), dict(tensor_model_parallel_size=2)
    assert LastLayer not in layers_of(spec, **split, sequence_parallel=True)
    assert LastLayer in layers_of(spec, **split, sequence_parallel=False)
