"""What a prediction asks of a GPU: the seconds of a kernel by its shape, and the links."""

from __future__ import annotations

from dataclasses import dataclass
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
