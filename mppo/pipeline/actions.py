"""The actions of an update as data: each pipeline stage executes a list of them in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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

Numbers = tuple[str, int, int, int]
"""Name of the role, indices of the mini-batch, the micro-batch and the chunk."""

COMPUTE: tuple[ActionKind, ...] = ("forward", "backward")


class Action(NamedTuple):
    """One action of a pipeline stage for one role.

    Args:
        kind: "forward" and "backward" compute a pass of one micro-batch. "receive_input" and
            "receive_gradient" post a non-blocking receive for the message that the next pass needs;
            that pass waits for the message. "send_output" and "send_gradient" start a
            non-blocking send. "reduce" starts the data-parallel reduction of a mini-batch's
            gradient. "norm" completes that gradient and starts the all-reduce of its norm. "step"
            waits for the norm, clips the gradient and updates the weights.
        role: name of the role, such as "actor".
        mini_batch: index of the mini-batch (optimizer step) within the role's update.
        micro_batch: index within the mini-batch; 0 for "reduce", "norm" and "step".
        chunk: index of the model chunk on this stage that the pass computes, or that computes or
            needs the message; 0 without interleaving, and for "reduce", "norm" and "step".
    """

    kind: ActionKind
    role: str
    mini_batch: int
    micro_batch: int = 0
    chunk: int = 0

    @property
    def numbers(self) -> Numbers:
        return self[1:]

    def of_kind(self, kind: ActionKind) -> Action:
        return Action(kind, *self[1:])


@dataclass(frozen=True)
class RoleWork:
    """The passes and optimizer steps of one role in an update, with their costs.

    All costs are in one arbitrary unit of time; ``mppo.pipeline.simulation`` makes them exact.

    Args:
        micro_batches: number of micro-batches of each mini-batch (optimizer step), per
            data-parallel rank.
        forward: cost of one micro-batch's forward pass on one stage, over all its chunks: one
            number for all stages, or one number per stage.
        backward: the same of the backward pass.
        reduce: cost of reducing one mini-batch's gradient, in the background.
        step: cost of an optimizer step; the stage computes nothing else meanwhile.
        chunks: number of model chunks on each stage. If there are several, the pipeline is
            interleaved and the numbers of micro-batches are multiples of the number of stages.
    """

    name: str
    micro_batches: tuple[int, ...]
    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    reduce: float = 0.0
    step: float = 0.0
    chunks: int = 1

    def most_in_flight(self, stage: int, stages: int, early: bool = True) -> int:
        """Largest number of chunk passes whose activations a stage holds.

        Args:
            early: as in Megatron's schedules: 1F1B or, with several chunks, its interleaved form,
                which computes one forward pass more than necessary in advance for each following
                stage (``get_pp_rank_microbatches`` of Megatron-Core). False: without these.
        """
        for_each_stage = 2 if early and self.chunks > 1 else 1
        return for_each_stage * (stages - stage - 1) + (self.chunks - 1) * stages + 1


def is_interleaved(roles: Sequence[RoleWork]) -> bool:
    return any(role.chunks > 1 for role in roles)


def memory_shares(
    roles: Sequence[RoleWork], stage: int, stages: int, early: bool = True
) -> tuple[list[int], int]:
    """Share of a stage's activation memory that one chunk pass of each role takes, and the whole,
    as integers. The memory suffices for ``most_in_flight`` passes of any role, and for passes of
    several roles if the sum of their shares does not exceed the whole."""
    limits = [role.most_in_flight(stage, stages, early) for role in roles]
    whole = math.lcm(*limits)
    return [whole // limit for limit in limits], whole


StageLists = list[list[Action]]
"""``lists[stage]``: the actions of a stage, in the order in which it executes them."""
