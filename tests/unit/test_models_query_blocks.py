"""Fewer queries than keys, in blocks that share a mask."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from mppo.models.attention.core import PackedAttention


@pytest.mark.parametrize(
    ("queries", "keys", "groups"), [(600, 1500, 4), (1024, 1100, 1), (513, 514, 2)]
)
def test_blocks_of_queries_attend_as_all_at_once(queries, keys, groups):
    heads, width = 4, 8
    config = TransformerConfig(num_layers=1, hidden_size=heads * width, num_attention_heads=heads)
    shapes = [(2, queries, heads), (2, keys, groups), (2, keys, groups)]
    ours = [torch.randn(*shape, width, requires_grad=True) for shape in shapes]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    out = PackedAttention(config, layer_number=1)._rows(*ours)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    q, k, v = (x.transpose(1, 2) for x in theirs)
    expected = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream.double())
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
