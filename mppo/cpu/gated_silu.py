"""``silu(gate) * up`` and its gradient, with as few memory passes as torch allows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_silu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[..., 2 f]`` to ``[..., f]``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gated_silu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``x`` ``[..., 2 f]`` from the gradient of the output ``[..., f]``.

    It allocates only the result.
    """
    gate, up = x.chunk(2, -1)
    out = torch.empty_like(x)
    grad_gate, grad_up = out.chunk(2, -1)
    torch.ops.aten.silu(gate, out=grad_up).mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward(grad_gate, gate, grad_input=grad_gate)
    return out
