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


PROGRAM = """
import torch
from mppo.parallel import megatron_without_te

megatron_without_te.install()
from megatron.core.transformer import multi_latent_attention as attention

# latent attention can ask whether a layer is Transformer Engine's
assert not isinstance(object(), attention.TELinear)
assert object not in [attention.TELinear, attention.TEColumnParallelLinear]

# a router computes its logits and their gradient
from megatron.core.transformer.moe.moe_utils import router_gating_linear

torch.manual_seed(0)
tokens = torch.randn(5, 8, requires_grad=True)
weight = torch.randn(3, 8, requires_grad=True)
logits = router_gating_linear(tokens, weight, None, torch.float32)
logits.square().sum().backward()
torch.testing.assert_close(logits, tokens @ weight.T)
torch.testing.assert_close(weight.grad, 2 * logits.detach().T @ tokens.detach())
"""


def test_latent_attention_and_a_router_work_where_megatron_is_as_it_was_installed():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True,
        timeout=300, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
