"""Fused rotary embedding, SwiGLU and weight gradients equal the unfused operations."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils

from mppo.cpu import fused


def both(function, reference, *inputs):
    """Outputs and input gradients of two functions on equal inputs."""
    found = []
    for each in (function, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = each(*leaves)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weight).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    return zip(*found)


@pytest.mark.parametrize("mscale", [1.0, 1.2])
@pytest.mark.parametrize("width", [4, 16])
def test_rotary_embedding_is_bitwise_the_unfused_one(mscale, width):
    """Of heads rotated in full or in part."""
    angles = torch.rand(7, 1, 1, width) * 6
    angles[..., width // 2 :] = angles[..., : width // 2]
    unfused = inspect.unwrap(rope_utils._apply_rotary_pos_emb_bshd)
    rotate = fused.with_fused_rotary(unfused)
    pairs = both(
        lambda x: rotate(x, angles, mscale=mscale),
        lambda x: unfused(x, angles, mscale=mscale),
        torch.randn(7, 1, 3, 16),
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_interleaved_rotary_stays_megatrons():
    seen = []
    rotate = fused.with_fused_rotary(lambda *arguments: seen.append(arguments[2:]))
    x, angles = torch.randn(2, 1, 1, 8), torch.rand(2, 1, 1, 8)
    rotate(x, angles, rotary_interleaved=True)
    assert seen == [(True, False, 1.0)]


def test_swiglu_is_bitwise_the_unfused_one():
    def unfused(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    pairs = both(lambda x: fused.swiglu(x, None), unfused, torch.randn(5, 2, 12))
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_weighted_swiglu_has_the_unfused_gradients():
    def unfused(x, weights):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * weights

    pairs = both(
        lambda x, w: fused.weighted_swiglu(x, None, w),
        unfused,
        torch.randn(5, 12),
        torch.rand(5, 1),
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_weights_gradient_is_added_in_float32(monkeypatch, rounds):
    monkeypatch.setattr(fused.onednn, "multiplies_bfloat16", lambda: rounds)
    inputs, grad = torch.randn(9, 4).bfloat16(), torch.randn(9, 3).bfloat16()
    expected = grad.float().T @ inputs.float()
    total = torch.full((3, 4), 300.0)
    fused.accumulate_weight_gradient(inputs, grad, total)
    added = total - 300
    torch.testing.assert_close(added, expected, rtol=2**-8 if rounds else 1e-4, atol=1e-4)
