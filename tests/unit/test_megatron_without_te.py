"""What Megatron-Core lacks where Transformer Engine is absent, without the CPU's stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed, so Megatron misses nothing",
)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, in which Megatron is as it was installed."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
        timeout=300, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


ROUTER = """
import torch
from mppo.parallel import megatron_without_te

megatron_without_te.install()
from megatron.core.transformer.moe.moe_utils import router_gating_linear

torch.manual_seed(0)
tokens = torch.randn(5, 8, requires_grad=True)
weight = torch.randn(3, 8, requires_grad=True)
logits = router_gating_linear(tokens, weight, None, torch.float32)
logits.square().sum().backward()
torch.testing.assert_close(logits, tokens @ weight.T)
torch.testing.assert_close(weight.grad, 2 * logits.detach().T @ tokens.detach())
"""


def test_a_router_computes_its_logits_and_their_gradient():
    result = run(ROUTER)
    assert result.returncode == 0, result.stderr


LATENT = """
from mppo.parallel import megatron_without_te

megatron_without_te.install()
from megatron.core.transformer import multi_latent_attention as attention

assert not isinstance(object(), attention.TELinear)
assert object not in [attention.TELinear, attention.TEColumnParallelLinear]
"""


def test_latent_attention_can_ask_whether_a_layer_is_transformer_engines():
    result = run(LATENT)
    assert result.returncode == 0, result.stderr
