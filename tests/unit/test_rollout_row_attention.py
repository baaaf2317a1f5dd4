"""Prefill in blocks of queries equals the explicit formula, windows and soft-caps included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mppo.rollout.local.row_attention import row_attention


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(q.shape[2])
    before = place[:, None] - place
    seen = before >= 0 if window is None else (before >= 0) & (before < window)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 300, 600, 1100])
def test_prefill_equals_the_formula(window, cap):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 1100, 8)
    k, v = torch.randn(2, 2, 1100, 8), torch.randn(2, 2, 1100, 6)
    layer = nn.Module()
    layer.row_window = window
    out, _ = row_attention(layer, q, k, v, None, softcap=cap)
    torch.testing.assert_close(out, written_out(q, k, v, window, cap), rtol=1e-5, atol=2e-6)
