"""On one GPU: torch's flash kernel equals the matrix products of a ring's blocks."""

from __future__ import annotations

import pytest
import torch

from mppo.models.attention.block import BlockAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("apart", [0, 48], ids=["own chunk", "earlier chunk"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("key_width", "value_width"), [(64, 64), (192, 128)])
def test_flash_kernel_equals_matrix_products(key_width, value_width, groups, apart):
    torch.manual_seed(0)
    shapes = [(4, key_width), (groups, key_width), (groups, value_width), (4, value_width)]
    half = [torch.randn(2, 48, *s, dtype=torch.bfloat16, device="cuda") for s in shapes]
    block, found = BlockAttention(scale=0.1), {}
    for name, dtype in (("flash", torch.bfloat16), ("products", torch.float32)):
        q, k, v, grad = (x.to(dtype) for x in half)
        assert block._flash_fits(q, k, v, apart) == (name == "flash")
        out, lse = block.forward(q, k, v, apart)
        found[name] = [out, lse, *block.backward(grad, q, k, v, out, lse, apart)]
    for got, want in zip(found["flash"], found["products"], strict=True):
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
