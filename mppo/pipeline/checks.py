"""Validation of a schedule's lists before they run, by executing them symbolically, twice.

In the first execution a pass blocks until its message has arrived, and "norm" is a barrier of all
stages: lists that complete do not deadlock where nothing else waits. It also checks that the
messages from a stage to its neighbour are sent in the order in which the neighbour posts its
receives. The second one (``stage_events.hang_of``) follows the rules of GPUs: sends that need a
receiver, streams, communicators, hardware queues, and hosts that wait for their streams.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from mppo.config.schedule import ScheduleKind
from mppo.pipeline.actions import (
    COMPUTE,
    Action,
    ActionKind,
    Numbers,
    RoleWork,
    StageLists,
    memory_shares,
)
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.stage_events import hang_of

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
    on, the lists deadlock with blocking receives, or a stage holds more activations than in
    Megatron's schedules."""
    stages = len(schedule.lists)
    for stage, actions in enumerate(schedule.lists):
        _check_actions(schedule, actions, stage, stages)
        _check_order(schedule, actions)
        _check_in_flight(schedule, actions, stage, stages)
    run_blocking(schedule.lists)


def run_blocking(lists: StageLists) -> None:
    """Execute the lists symbolically, with blocking receives; ScheduleFault if the stages deadlock,
    a message is paired with another's receive, or a message or a receive is left over."""
    _BlockingRun(lists).run()


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


class _BlockingRun:
    def __init__(self, lists: StageLists) -> None:
        self._lists = lists
        self._next = [0] * len(lists)
        self._down: list[deque[Numbers]] = [deque() for _ in lists]
        self._up: list[deque[Numbers]] = [deque() for _ in lists]
        self._receives_down: list[deque[Numbers]] = [deque() for _ in lists]
        self._receives_up: list[deque[Numbers]] = [deque() for _ in lists]
        self._inputs, self._gradients = (
            [{action.numbers for action in actions if action.kind == kind} for actions in lists]
            for kind in _RECEIVES.values()
        )

    def run(self) -> None:
        """Advance the stages until none can proceed, then check that all lists are complete."""
        while any([self._advance(stage) for stage in range(len(self._lists))]) or self._pass_norm():
            pass
        for stage, actions in enumerate(self._lists):
            if self._next[stage] < len(actions):
                raise ScheduleFault(f"stage {stage} waits forever at {actions[self._next[stage]]}")
        for queues in (self._down, self._up, self._receives_down, self._receives_up):
            if any(queues):
                raise ScheduleFault(f"messages or receives are left over: {queues}")

    def _advance(self, stage: int) -> bool:
        begin = self._next[stage]
        while self._next[stage] < len(self._lists[stage]):
            if not self._execute(stage, self._lists[stage][self._next[stage]]):
                break
            self._next[stage] += 1
        return self._next[stage] > begin

    def _execute(self, stage: int, action: Action) -> bool:
        stages, numbers = len(self._lists), action.numbers
        if action.kind == "norm":
            return False
        if action.kind == "receive_input":
            self._receives_down[stage].append(numbers)
        elif action.kind == "receive_gradient":
            self._receives_up[stage].append(numbers)
        elif action.kind == "send_output":
            # the first stage receives it for the next chunk
            chunk = action.chunk + (stage == stages - 1)
            self._down[(stage + 1) % stages].append((*numbers[:-1], chunk))
        elif action.kind == "send_gradient":
            chunk = action.chunk - (stage == 0)
            self._up[(stage - 1) % stages].append((*numbers[:-1], chunk))
        elif action.kind == "forward" and numbers in self._inputs[stage]:
            return _take(self._down[stage], self._receives_down[stage], action)
        elif action.kind == "backward" and numbers in self._gradients[stage]:
            return _take(self._up[stage], self._receives_up[stage], action)
        return True

    def _pass_norm(self) -> bool:
        here = {
            actions[at] if at < len(actions) else None
            for actions, at in zip(self._lists, self._next, strict=True)
        }
        if len(here) > 1 or (action := here.pop()) is None or action.kind != "norm":
            return False
        self._next = [at + 1 for at in self._next]
        return True


def _take(messages: deque[Numbers], receives: deque[Numbers], action: Action) -> bool:
    if not messages:
        return False
    message, receive = messages.popleft(), receives.popleft() if receives else None
    for found in (message, receive):
        if found != action.numbers:
            raise ScheduleFault(f"{action} is paired with the message of {found}")
    return True
