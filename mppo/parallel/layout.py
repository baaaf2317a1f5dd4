"""A role's layout over the ranks, as plain arithmetic (no process group).

Rank order is Megatron's ``tp-cp-ep-dp-pp``: tensor ranks are neighbours, pipeline stages farthest
apart. For experts the order is ``etp-ep-edp-pp`` on the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mppo.safety.input_error import InputError


@dataclass(frozen=True)
class Coordinates:
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the tensor, pipeline, context, expert and expert-tensor axes of one role, and
    ``vpp`` model chunks per pipeline stage; InputError if they do not fit the world size."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp * self.cp):
            raise InputError(
                f"world size {self.world} is not a multiple of "
                f"tp x pp x cp = {self.tp} x {self.pp} x {self.cp} = {self.tp * self.pp * self.cp}"
            )
        if self.world % (self.etp * self.ep * self.pp):
            raise InputError(
                f"world size {self.world} is not a multiple of "
                f"etp x ep x pp = {self.etp} x {self.ep} x {self.pp} = "
                f"{self.etp * self.ep * self.pp}"
            )

    def megatron_sizes(self) -> dict[str, Any]:
        """Return the sizes by the names that Megatron's parallel state and configurations share."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }

    @property
    def dp(self) -> int:
        """Data-parallel size, without context parallelism."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        edp = rest % self.edp
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def bubble_fraction(self, microbatches: int) -> float:
        """Idle fraction of the pipeline under 1F1B (``vpp`` 1) or interleaving: ``(pp - 1) / vpp``
        idle forward-backward slots for ``microbatches`` of work (Narayanan et al. 2021, 2.2)."""
        idle = (self.pp - 1) / self.vpp
        return idle / (microbatches + idle)

    def describe(self) -> str:
        """Name the axes larger than one, such as ``TP2 x PP2``; ``DP1`` if all are one. ETP is
        named where it is not TP, and beside EP."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep}
        if self.ep > 1 or self.etp not in (1, self.tp):
            sizes["ETP"] = self.etp
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "ETP"]
        return " x ".join(parts + ([f"DP{self.dp}"] if self.dp > 1 or not parts else []))
