"""A GPU whose kernels take exactly their least time, and roles on it."""

from __future__ import annotations

from typing import Any

from mppo.batch.microbatches import MicroBatchLimits
from mppo.parallel.layout import Layout
from mppo.planning.flops import model_flops
from mppo.planning.memory import (
    count_parameters,
    experts_per_token,
    model_parameters,
    stage_layers,
)
from mppo.planning.time.kernels import GpuSystem, Kernels
from mppo.planning.time.role_load import RoleLoad
from mppo.recipe.model_shape import model_shape
from mppo.weights.table import parameter_table


class Peak:
    """Kernels at the roofline: the longer of operations over the peak and bytes over bandwidth."""

    def __init__(self, memory: float = 3e12, beside: bool = True) -> None:
        self.source = "the roofline"
        links = (8, 450e9, 50e9, 60e9, 1e-6)
        self.system = GpuSystem("peak", 1e15, memory, *links, beside)

    def gemm(self, m, n, k):
        return self._least(2 * m * n * k, 2 * (m * k + k * n + m * n))

    def attention(self, batch, length, heads, kv_heads, dim):
        return self._least(2 * batch * length**2 * heads * dim, 0)

    def decode(self, batch, context, heads, kv_heads, dim):
        return self._least(4 * batch * context * heads * dim, 4 * batch * context * kv_heads * dim)

    def latent_decode(self, batch, context, heads):
        return self._least(2 * batch * context * heads * 1088, 2 * batch * context * 576)

    def experts(self, tokens, hidden, width, active, experts, tp, ep):
        return self._least(6 * tokens * active * hidden * width / (tp * ep), 0)

    def collective(self, kind, nbytes, ranks):
        return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks / 450e9

    def _least(self, flops, nbytes):
        return max(flops / self.system.flops, nbytes / self.system.memory)


PEAK: Kernels = Peak()
ENDLESS: Kernels = Peak(memory=1e18)
"""The same with memory that takes no time."""


def role_load(
    config: Any, name: str = "actor", world: int = 8, tp: int = 1, pp: int = 1, cp: int = 1,
    ep: int = 1, recomputes: bool = False, limits: MicroBatchLimits | None = None,
) -> RoleLoad:  # fmt: skip
    """A trained role of a model."""
    layout, shape = Layout(world, tp=tp, pp=pp, cp=cp, ep=ep), model_shape(config)
    table, layers = parameter_table(shape), stage_layers(shape.num_layers, pp)
    policy = name == "actor"
    limits = limits or MicroBatchLimits(1, 8192)
    flops = model_flops(config, "policy" if policy else "value")
    return RoleLoad(
        name, shape, experts_per_token(config), flops, layout, layers,
        [count_parameters(table, layout, i, own, False).total for i, own in enumerate(layers)],
        policy, 2, 1, limits, limits, model_parameters(table), recomputes,
    )  # fmt: skip
