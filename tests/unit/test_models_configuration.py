"""Which fused kernels a model uses, by family and by what is installed."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import layers

from mppo.hub.builtin import load_config, resolve_model
from mppo.models.configuration import fields_set, fused_kernels
from mppo.models.families.architectures import family_config
from mppo.parallel import device, megatron_without_te
from mppo.parallel.layout import Layout
from mppo.recipe.sections.megatron import MegatronConfig

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def _family(name: str, **changes: object):
    config = load_config(resolve_model(f"builtin:{name}"))
    for key, value in changes.items():
        setattr(config, key, value)
    return family_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "rope", "permutation"),
    [
        ("tiny", {}, True, False),
        ("tiny", {"rope_parameters": YARN}, False, False),
        ("tiny-moe", {}, True, True),
        ("tiny-moonlight", {}, False, True),
    ],
)
def test_transformer_engines_kernels_are_used_where_they_compute_the_model(
    name, changes, rope, permutation
):
    family = _family(name, **changes)
    fused = fused_kernels(family, use_te=True, own_accumulation=False)
    assert fused == {
        "gradient_accumulation_fusion": True,
        "apply_rope_fusion": rope,
        "moe_permute_fusion": permutation,
    }
    assert not any(fused_kernels(family, use_te=False, own_accumulation=False).values())


@pytest.mark.parametrize("trained", [True, False])
def test_only_a_trained_role_adds_gradients_to_buffers(trained, monkeypatch):
    monkeypatch.setattr(device, "accumulates_weight_gradients", lambda: True)
    fields = fields_set(_family("tiny"), MegatronConfig(), Layout(1), torch.float32, trained)
    assert fields["gradient_accumulation_fusion"] == trained


def test_no_pipeline_message_waits_for_the_whole_device():
    fields = fields_set(_family("tiny"), MegatronConfig(), Layout(2, pp=2), torch.float32)
    assert fields["batch_p2p_sync"] is False


def test_gradients_of_megatrons_own_layers_are_added_in_float32():
    kept = layers._grad_accum_fusion_available, vars(layers).get("fused_weight_gradient_mlp_cuda")
    try:
        megatron_without_te.fuse_weight_gradients()
        assert layers._grad_accum_fusion_available
        kernel = vars(layers)["fused_weight_gradient_mlp_cuda"]
        inputs, grad = torch.randn(6, 4).bfloat16(), torch.randn(6, 3).bfloat16()
        buffer = torch.ones(3, 4)
        kernel.wgrad_gemm_accum_fp32(inputs, grad, buffer)
        torch.testing.assert_close(buffer, 1 + grad.float().t() @ inputs.float())
    finally:
        layers._grad_accum_fusion_available, layers.fused_weight_gradient_mlp_cuda = kept


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_interleaved_schedule_keeps_outputs_whose_send_is_under_way(
    chunks, on_cuda, monkeypatch
):
    """Megatron frees them then; torch keeps the tensor of a send, but not its memory."""
    monkeypatch.setattr(device, "is_cuda", lambda: on_cuda)
    layout = Layout(2, pp=2, vpp=chunks)
    fields = fields_set(_family("tiny"), MegatronConfig(), layout, torch.float32)
    assert fields["deallocate_pipeline_outputs"] == (chunks == 1)
