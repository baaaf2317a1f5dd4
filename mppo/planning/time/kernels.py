"""What a prediction asks of a GPU: the seconds of a kernel by its shape, and the links; for a GPU
without measurements, from those of another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]


@dataclass(frozen=True)
class GpuSystem:
    """A GPU and its links.

    Args:
        flops: peak of dense bfloat16 products, operations per second.
        memory: bandwidth of its memory, bytes per second.
        gpus_per_node: GPUs that share the fast links.
        within: bandwidth of a GPU's links within a node, bytes per second and direction.
        across: the same of its network card between nodes.
        host: the same of its link to the host.
        latency: seconds of a message between nodes.
        beside: exchanges can run beside kernels; False: a processor, which computes both.
    """

    name: str
    flops: float
    memory: float
    gpus_per_node: int
    within: float
    across: float
    host: float
    latency: float
    beside: bool = True


class Kernels(Protocol):
    """Seconds of single kernels in bfloat16."""

    @property
    def system(self) -> GpuSystem: ...

    @property
    def source(self) -> str:
        """Where the seconds come from, with its version and what had to be assumed."""
        ...

    def gemm(self, m: int, n: int, k: int) -> float:
        """A product of ``[m, k]`` and ``[k, n]``."""
        ...

    def attention(self, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> float:
        """Causal attention of ``batch`` sequences, forward."""
        ...

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
        """Attention of one new token of each of ``batch`` sequences."""
        ...

    def latent_decode(self, batch: int, context: int, heads: int) -> float:
        """The same of multi-head latent attention over its compressed cache."""
        ...

    def experts(self, tokens: int, hidden: int, width: int, active: int, experts: int, tp: int,
                ep: int) -> float:  # fmt: skip
        """The routed experts of an engine's layer, both products, on one of ``tp * ep`` ranks."""
        ...

    def collective(self, kind: Collective, nbytes: float, ranks: int) -> float:
        """A collective of ranks within a node; ``nbytes`` is the size of the whole tensor."""
        ...


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
