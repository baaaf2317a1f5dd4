"""What runs when in a stage of the loop: a plain list of actions.

The executor (``mppo.pipeline.executor``) carries actions out in order. The kinds here hand a whole
list of micro-batches to Megatron's own 1F1B or interleaved schedule; finer-grained schedules add
kinds beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mppo.pipeline.microbatches import MicroBatchLimits, MicroBatchPlan, plan_microbatches

ActionKind = Literal["forward", "forward_backward", "optimizer_step"]


@dataclass(frozen=True)
class Action:
    """One thing a role does.

    Args:
        kind: "forward" fills in a measurement, "forward_backward" accumulates gradients,
            "optimizer_step" applies them.
        role: which role.
        mini_batch: indices of the mini-batch's sequences (all of the batch for "forward").
        microbatches: the plan; empty for "optimizer_step".
    """

    kind: ActionKind
    role: str
    mini_batch: tuple[int, ...]
    microbatches: MicroBatchPlan


@dataclass(frozen=True)
class MicroBatchSpec:
    """What a schedule needs to know of a role."""

    name: str
    dp: int
    count_multiple: int
    limits: MicroBatchLimits


def forward_schedule(lengths: Sequence[int], roles: Sequence[MicroBatchSpec]) -> list[Action]:
    """One forward pass of each role over the whole batch."""
    everything = tuple(range(len(lengths)))
    return [
        Action(
            "forward",
            role.name,
            everything,
            plan_microbatches(lengths, everything, role.dp, role.limits, role.count_multiple),
        )
        for role in roles
    ]


def update_schedule(
    lengths: Sequence[int], role: MicroBatchSpec, mini_batches: Sequence[Sequence[int]]
) -> list[Action]:
    """Gradient and step for each mini-batch in turn.

    Invariant: every "forward_backward" is followed by its "optimizer_step".
    """
    actions = []
    for mini_batch in mini_batches:
        plan = plan_microbatches(lengths, mini_batch, role.dp, role.limits, role.count_multiple)
        actions.append(Action("forward_backward", role.name, tuple(mini_batch), plan))
        actions.append(Action("optimizer_step", role.name, tuple(mini_batch), []))
    return actions


def joint_rounds(schedules: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Lay the update schedules of several roles side by side, mini-batch by mini-batch.

    A round holds the i-th gradient of every role that has one, then their optimizer steps, which
    are to be taken together: all or none. The roles' numbers are those of one after the other,
    for neither reads what the other has updated.

    Args:
        schedules: from ``update_schedule``, one per role.
    """
    rounds = []
    for first in range(0, max(map(len, schedules), default=0), 2):
        pairs = [schedule[first : first + 2] for schedule in schedules if first < len(schedule)]
        rounds.append([gradient for gradient, _ in pairs] + [step for _, step in pairs])
    return rounds
