"""Kernels of a GPU without measurements, from those of another one."""

from __future__ import annotations

from dataclasses import replace

from mppo.planning.time.kernels import Collective, GpuSystem, Kernels


class Scaled:
    """Kernels that reach the same share of the least possible time as on a measured GPU.

    The least possible time of a kernel is the longer of its operations over the peak (``flops``,
    operations per second) and its bytes over the memory's bandwidth (Williams et al. 2009,
    roofline). Bandwidths are in bytes per second.
    """

    def __init__(
        self, measured: Kernels, name: str, flops: float, memory: float, within: float
    ) -> None:
        self._measured = measured
        self.system: GpuSystem = replace(
            measured.system, name=name, flops=flops, memory=memory, within=within
        )

    @property
    def source(self) -> str:
        name = self.system.name
        return f"{self._measured.source}; scaled to {name} by peak and bandwidth: not measured"

    def gemm(self, m: int, n: int, k: int) -> float:
        ratio = self._ratio(2 * m * n * k, 2 * (m * n + m * k + n * k))
        return ratio * self._measured.gemm(m, n, k)

    def attention(self, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> float:
        flops = 2 * batch * length**2 * heads * dim
        ratio = self._ratio(flops, 4 * batch * length * (heads + kv_heads) * dim)
        return ratio * self._measured.attention(batch, length, heads, kv_heads, dim)

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
        read = 4 * batch * context * kv_heads * dim
        ratio = self._ratio(4 * batch * context * heads * dim, read)
        return ratio * self._measured.decode(batch, context, heads, kv_heads, dim)

    def latent_decode(self, batch: int, context: int, heads: int) -> float:
        # 512 + 64 elements of a token's cache (DeepSeek-V2)
        ratio = self._ratio(2 * batch * context * heads * 1088, 2 * batch * context * 576)
        return ratio * self._measured.latent_decode(batch, context, heads)

    def experts(self, tokens: int, hidden: int, width: int, active: int, experts: int, tp: int,
                ep: int) -> float:  # fmt: skip
        flops = 6 * tokens * active * hidden * width / (tp * ep)
        ratio = self._ratio(flops, 6 * min(experts, tokens * active) * hidden * width / (tp * ep))
        return ratio * self._measured.experts(tokens, hidden, width, active, experts, tp, ep)

    def collective(self, kind: Collective, nbytes: float, ranks: int) -> float:
        ratio = self._measured.system.within / self.system.within
        return ratio * self._measured.collective(kind, nbytes, ranks)

    def _ratio(self, flops: float, nbytes: float) -> float:
        own, other = self.system, self._measured.system
        return max(flops / own.flops, nbytes / own.memory) / max(
            flops / other.flops, nbytes / other.memory
        )
