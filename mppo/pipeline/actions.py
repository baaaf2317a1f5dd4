"""The actions of an update, as data: what each pipeline stage does, one thing after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActionKind = Literal[
    "forward",
    "backward",
    "receive_input",
    "receive_gradient",
    "send_output",
    "send_gradient",
    "reduce",
    "norm",
    "step",
]

COMPUTE: tuple[ActionKind, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Action:
    """One thing a stage does for a role.

    Args:
        kind: "forward" and "backward" compute one micro-batch. "receive_input" and
            "receive_gradient" make room for the message that such a computation needs, and do not
            wait; the computation does. "send_output" and "send_gradient" do not wait either.
            "reduce" begins the reduction of a mini-batch's gradient over data parallelism; "norm"
            completes that gradient and begins the sum of its norm over all stages; "step" waits for
            the norm, clips and updates the weights.
        role: whose.
        mini_batch: number of the role's optimizer step.
        micro_batch: number within the mini-batch; 0 for "reduce", "norm" and "step".
    """

    kind: ActionKind
    role: str
    mini_batch: int
    micro_batch: int = 0


@dataclass(frozen=True)
class RoleWork:
    """What a role does in an update, and what that costs.

    Args:
        name: of the role.
        micro_batches: of each mini-batch (optimizer step), per data-parallel rank.
        forward: cost of a micro-batch's forward pass on every stage, or on each.
        backward: the same of its backward pass.
        reduce: of reducing a gradient, behind the stage's computations.
        step: of an optimizer step, which the stage computes.
    """

    name: str
    micro_batches: tuple[int, ...]
    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    reduce: float = 0.0
    step: float = 0.0

    def costs(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Costs of a forward and of a backward pass on each stage."""
        forward, backward = (
            (cost,) * stages if isinstance(cost, int | float) else cost
            for cost in (self.forward, self.backward)
        )
        assert len(forward) == len(backward) == stages
        return forward, backward


StageLists = list[list[Action]]
"""``lists[stage]``: the actions of a stage in order."""
