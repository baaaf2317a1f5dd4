"""The actions of an update as data: each pipeline stage executes a list of them in order."""

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
    """One action of a pipeline stage for one role.

    Args:
        kind: "forward" and "backward" compute a pass of one micro-batch. "receive_input" and
            "receive_gradient" post a non-blocking receive for the message that a later pass needs;
            that pass waits for the message. "send_output" and "send_gradient" start a
            non-blocking send. "reduce" starts the data-parallel reduction of a mini-batch's
            gradient. "norm" completes that gradient and starts the all-reduce of its norm. "step"
            waits for the norm, clips the gradient and updates the weights.
        role: name of the role, such as "actor".
        mini_batch: index of the mini-batch (optimizer step) within the role's update.
        micro_batch: index of the micro-batch within the mini-batch; 0 for "reduce", "norm" and
            "step".
    """

    kind: ActionKind
    role: str
    mini_batch: int
    micro_batch: int = 0


@dataclass(frozen=True)
class RoleWork:
    """The passes and optimizer steps of one role in an update, with their costs.

    All costs are in one arbitrary unit of time.

    Args:
        name: name of the role.
        micro_batches: number of micro-batches of each mini-batch (optimizer step), per
            data-parallel rank.
        forward: cost of one micro-batch's forward pass on one stage: one number for all stages, or
            one number per stage.
        backward: cost of one micro-batch's backward pass on one stage, in the same form.
        reduce: cost of reducing one mini-batch's gradient; the reduction runs in the background
            while the stage computes.
        step: cost of an optimizer step; the stage computes nothing else meanwhile.
    """

    name: str
    micro_batches: tuple[int, ...]
    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    reduce: float = 0.0
    step: float = 0.0

    def costs(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Costs of one forward pass and of one backward pass on each stage."""
        forward, backward = (
            (cost,) * stages if isinstance(cost, int | float) else cost
            for cost in (self.forward, self.backward)
        )
        assert len(forward) == len(backward) == stages
        return forward, backward


StageLists = list[list[Action]]
"""``lists[stage]``: the actions of a stage, in the order in which it executes them."""
