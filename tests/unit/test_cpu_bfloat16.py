"""bfloat16 products and attention that are computed in float32 on CPUs where that is faster."""

import pytest
import torch
import torch.nn.functional as F

from mppo.cpu import bfloat16
from mppo.rollout.local.local_engine import compute_dtype

products = pytest.mark.skipif(
    "mm" not in bfloat16.slow_operators(),
    reason="this CPU has bfloat16 instructions: its products are not replaced",
)
gradient = pytest.mark.skipif(
    not bfloat16.slow_operators(), reason="this CPU is fast in bfloat16: nothing is replaced"
)


@pytest.fixture(autouse=True)
def _installed():
    bfloat16.install()


def rounded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@products
def test_products_are_the_float32_ones_rounded_once():
    a, b, c = rounded(5, 7), rounded(7, 3), rounded(3)
    assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
    assert torch.equal(F.linear(a, b.T, c), torch.addmm(c.float(), a.float(), b.float()).bfloat16())
    assert torch.equal(torch.mm(a, b, out=torch.empty(5, 3).bfloat16()), a @ b)
    x, y = rounded(2, 5, 7), rounded(2, 7, 3)
    assert torch.equal(x @ y, (x.float() @ y.float()).bfloat16())


@products
def test_gradients_are_the_float32_ones_of_the_rounded_operands():
    a, b = rounded(5, 7).requires_grad_(), rounded(7, 3).requires_grad_()
    (a @ b).sum().backward()
    wide_a, wide_b = (x.detach().float().requires_grad_() for x in (a, b))
    (wide_a @ wide_b).sum().backward()
    assert torch.equal(a.grad, wide_a.grad.bfloat16())
    assert torch.equal(b.grad, wide_b.grad.bfloat16())


@gradient
def test_attention_and_its_gradients_agree_with_float32():
    operands = [rounded(2, 4, 9, 16).requires_grad_() for _ in range(3)]
    wide = [x.detach().float().requires_grad_() for x in operands]
    out, expected = (
        F.scaled_dot_product_attention(*each, is_causal=True) for each in (operands, wide)
    )
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    weight = rounded(*out.shape)
    (out * weight).sum().backward()
    (expected * weight.float()).sum().backward()
    for ours, theirs in zip(operands, wide):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=0.02, rtol=0.02)


@gradient
def test_attentions_gradient_is_the_float32_one_rounded_once():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key, value, grad = (rounded(2, 4, 9, 16) for _ in range(4))
    out, normaliser = attention(query, key, value, 0.0, True)
    wide = (x.float() for x in (grad, query, key, value, out))
    expected = backward(*wide, normaliser, 0.0, True)
    got = backward(grad, query, key, value, out, normaliser, 0.0, True)
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(got, expected, strict=True))


def test_float32_uses_torchs_own_kernels():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    assert torch.equal(a @ b, torch.mm(a, b, out=torch.empty(5, 3)))


def test_the_step_is_recorded_for_float64_too():
    a = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: x @ x, a)


@pytest.mark.parametrize(
    ("unit", "limit", "multiplies"),
    [
        (None, "", False),
        ("avx512_bf16", "", True),
        ("amx_bf16", "default", True),
        ("avx512_bf16", "avx512_core_vnni", False),
        ("amx_bf16", "AVX2", False),
    ],
)
def test_training_and_generation_use_float32_on_the_same_processors(
    monkeypatch, unit, limit, multiplies
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, unit: True})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert bfloat16.multiplies_bfloat16() is multiplies
    assert ("mm" in bfloat16.slow_operators()) is not multiplies
    wide = compute_dtype(torch.bfloat16, torch.device("cpu")) is torch.float32
    assert wide is not multiplies
