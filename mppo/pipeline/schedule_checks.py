"""Validation of a schedule's lists before they run.

Every stage's list has all actions, each after those that it depends on. ``stage_events.hang_of``
then executes the lists of all stages by the rules of GPUs: sends that need a receiver, streams,
communicators, hardware queues, and hosts that wait for their streams. It pairs the messages of two
neighbours in the order of their lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from mppo.pipeline.actions import (
    COMPUTE,
    Action,
    ActionKind,
    RoleWork,
    memory_shares,
)
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.stage_events import hang_of
from mppo.recipe.schedule_kind import ScheduleKind

_RECEIVES: dict[str, ActionKind] = {"forward": "receive_input", "backward": "receive_gradient"}
_SENDS: dict[str, ActionKind] = {"forward": "send_output", "backward": "send_gradient"}
_STEP_KINDS: tuple[ActionKind, ...] = ("reduce", "norm", "step")


class ScheduleFault(AssertionError):
    """A schedule is invalid and must not run."""


@lru_cache(maxsize=64)
def checked_schedule(
    kind: ScheduleKind, roles: tuple[RoleWork, ...], stages: int
) -> tuple[Schedule, str | None]:
    """Make a schedule with ``make_schedule`` and check it; results are cached. Returns it and None;
    if it is invalid, a "sequential" schedule and the fault. ScheduleFault: that is invalid too."""
    schedule = make_schedule(kind, roles, stages)
    try:
        check_schedule(schedule)
    except ScheduleFault as fault:
        if kind == "sequential":
            raise
        return checked_schedule("sequential", roles, stages)[0], str(fault)
    return schedule, None


def check_schedule(schedule: Schedule) -> None:
    """Raise ScheduleFault if ``check_lists`` does, or stages could wait for each other for ever."""
    check_lists(schedule)
    hang = hang_of(schedule.lists, schedule.roles)
    if hang is not None:
        raise ScheduleFault(hang)


def check_lists(schedule: Schedule) -> None:
    """Raise ScheduleFault if an action is missing, duplicated or precedes another that it depends
    on, or a stage holds more activations than in Megatron's schedules."""
    stages = len(schedule.lists)
    for stage, actions in enumerate(schedule.lists):
        _check_actions(schedule, actions, stage, stages)
        _check_order(schedule, actions)
        _check_in_flight(schedule, actions, stage, stages)


def _check_actions(schedule: Schedule, actions: Sequence[Action], stage: int, stages: int) -> None:
    expected: set[Action] = set()
    for role in schedule.roles:
        for chunk in range(role.chunks):
            kinds: list[ActionKind] = [*COMPUTE]
            if stage > 0 or chunk > 0:
                kinds += ("receive_input", "send_gradient")
            if stage < stages - 1 or chunk < role.chunks - 1:
                kinds += ("send_output", "receive_gradient")
            for i, count in enumerate(role.micro_batches):
                expected |= {Action(k, role.name, i, j, chunk) for k in kinds for j in range(count)}
        rounds = range(len(role.micro_batches))
        expected |= {Action(kind, role.name, i) for kind in _STEP_KINDS for i in rounds}
    if len(actions) != len(expected) or set(actions) != expected:
        present = Counter(actions)
        raise ScheduleFault(
            f"stage {stage}: missing {expected - present.keys()}, "
            f"unexpected {present - Counter(expected)}"
        )


def _check_order(schedule: Schedule, actions: Sequence[Action]) -> None:
    """Check that a role's micro-batches are in order, and each step between its mini-batches."""
    at = {action: position for position, action in enumerate(actions)}
    for role in schedule.roles:
        chunks = range(role.chunks - 1, -1, -1)
        for i, count in enumerate(role.micro_batches):
            for kind, chunk in product(COMPUTE, range(role.chunks)):
                places = [at[Action(kind, role.name, i, j, chunk)] for j in range(count)]
                if places != sorted(places):
                    raise ScheduleFault(f"{kind} passes of {role.name} {i} are out of order")
            # a mini-batch's last backward passes are those of its first chunk
            last = [at[Action("backward", role.name, i, count - 1, chunk)] for chunk in chunks]
            last += [at[Action(kind, role.name, i)] for kind in _STEP_KINDS]
            if i + 1 < len(role.micro_batches):
                first = Action("forward", role.name, i + 1, 0)
                last.append(at.get(first.of_kind("receive_input"), at[first]))
            if last != sorted(last):
                raise ScheduleFault(f"the step of {role.name} {i} is out of order")
            if schedule.stream.together:
                first = at[Action("step", role.name, i)]
                others = [r.name for r in schedule.roles if i < len(r.micro_batches)]
                if any(at[Action("norm", name, i)] > first for name in others):
                    raise ScheduleFault(f"the steps of mini-batch {i} are not taken together")
    for action, position in at.items():
        if action.kind in _RECEIVES:
            receive, message = (action.of_kind(x[action.kind]) for x in (_RECEIVES, _SENDS))
            if at.get(receive, -1) > position or at.get(message, position) < position:
                raise ScheduleFault(
                    f"{action} precedes the receive of its input or follows the send of its output"
                )


def _check_in_flight(
    schedule: Schedule, actions: Sequence[Action], stage: int, stages: int
) -> None:
    shares, whole = memory_shares(schedule.roles, stage, stages)
    share_of = {role.name: share for role, share in zip(schedule.roles, shares, strict=True)}
    held = 0
    for action in actions:
        held += {"forward": 1, "backward": -1}.get(action.kind, 0) * share_of[action.role]
        if held > whole:
            raise ScheduleFault(
                f"stage {stage} holds {held / whole:.2f} of Megatron's activations at {action}"
            )
