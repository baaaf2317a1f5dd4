"""On one GPU with flash-attn: its attention and gradients equal scaled_dot_product_attention's."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[7, 7], [5, 1, 9]])
def test_flash_attention_equals_sdpa(monkeypatch, lengths, window):
    pytest.importorskip("flash_attn", reason="needs the package flash-attn")
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mppo.models.attention import flash
    from mppo.models.attention.core import PackedAttention
    from mppo.models.attention.packed_sequences import pack_sequences

    config = TransformerConfig(
        num_layers=1,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        window_size=None if window is None else (window - 1, 0),
    )
    attention = PackedAttention(config, layer_number=1)
    packing = pack_sequences(torch.tensor([0, *lengths]).cumsum(0)).on_device()
    torch.manual_seed(0)
    shapes = [(sum(lengths), 1, heads, 32) for heads in (4, 2, 2)]
    found = {}
    for name, fits in (("flash", flash.fits), ("sdpa", lambda q, v: False)):
        monkeypatch.setattr(flash, "fits", fits)
        torch.manual_seed(1)
        inputs = [torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, None, packed_seq_params=packing)
        out.square().sum().backward()
        found[name] = [out, *(x.grad for x in inputs)]
    for got, want in zip(found["flash"], found["sdpa"], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
