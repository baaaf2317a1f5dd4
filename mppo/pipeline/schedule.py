"""Schedules: the list of actions that each pipeline stage executes in an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from mppo.pipeline.actions import Action, ActionKind, RoleWork, StageLists, is_interleaved
from mppo.pipeline.simulation import (
    Simulation,
    Step,
    greedy_orders,
    simulate,
    stage_order,
    steps_of,
)
from mppo.pipeline.stage_events import hang_of
from mppo.pipeline.streams import Stream, StreamEntry, candidate_streams
from mppo.recipe.schedule_kind import ScheduleKind


@dataclass(frozen=True)
class Schedule:
    """The schedule of one update; ``simulation`` is at the costs in ``roles``."""

    kind: ScheduleKind
    roles: tuple[RoleWork, ...]
    stream: Stream
    steps: list[Step]
    simulation: Simulation
    lists: StageLists

    def rest_after(self, stage: int, position: int) -> list[Action]:
        """Return the actions that a stage must still execute if the update ends early at the "step"
        at ``position``, which is not taken either.

        All stages end the update at the same step, but reach it at different times. Micro-batches
        that entered the pipeline before the first one that needs this step are computed to their
        end on every stage, because their messages may be in flight. No further step is taken.
        """
        left = self.lists[stage][position]
        assert left.kind == "step"
        names = [role.name for role in self.roles]
        here = next(
            s for s in self.steps if (names[s.role], s.mini_batch) == (left.role, left.mini_batch)
        )
        entered = {
            (names[e.role], e.mini_batch, e.micro_batch) for e in self.stream.entries[: here.before]
        }
        ended = {(names[s.role], s.mini_batch) for s in self.steps if s.last < here.before}
        rest = []
        for action in self.lists[stage][position + 1 :]:
            if action.kind in ("reduce", "norm"):
                keep = (action.role, action.mini_batch) in ended
            else:
                keep = (action.role, action.mini_batch, action.micro_batch) in entered
            if keep and action.kind != "step":
                rest.append(action)
        return rest


@lru_cache(maxsize=64)
def make_schedule(kind: ScheduleKind, roles: tuple[RoleWork, ...], stages: int) -> Schedule:
    """Make the schedule of a kind with the shortest simulated time; the same on every rank.

    Each candidate stream is simulated with the stage orders of 1F1B, which do not depend on the
    costs, and with those of ``greedy_orders``, which are faster if a role has few micro-batches.
    With interleaving, orders that hold fewer activations (``RoleWork.most_in_flight``) are
    candidates as well: they complete a mini-batch earlier, so its step delays others less.

    The fastest candidate whose stages cannot wait for each other for ever (``hang_of``) is chosen.
    One that stays free of such waits if a pass waits for the whole device is preferred if it is at
    most a tenth slower. With interleaving hardly any does.

    If all candidates can hang, the fastest is returned, which ``mppo.pipeline.schedule_checks``
    refuses.
    """
    candidates = _candidates(kind, roles, stages)
    safe: Schedule | None = None
    for simulation, stream in candidates:
        if safe and (is_interleaved(roles) or simulation.end > _SLOWER * safe.simulation.end):
            break
        schedule = _with_lists(kind, roles, stream, simulation)
        if not is_interleaved(roles) and hang_of(schedule.lists, roles, "device") is None:
            return schedule
        if safe is None and hang_of(schedule.lists, roles) is None:
            safe = schedule
    simulation, stream = candidates[0]
    return safe or _with_lists(kind, roles, stream, simulation)


_SLOWER = 1.1


def _candidates(
    kind: ScheduleKind, roles: tuple[RoleWork, ...], stages: int
) -> list[tuple[Simulation, Stream]]:
    found: list[tuple[Simulation, Stream]] = []
    choices = (True, False) if is_interleaved(roles) else (True,)
    for stream, early in product(candidate_streams(kind, roles, stages), choices):
        usual = [stage_order(stream, roles, stage, stages, early) for stage in range(stages)]
        for orders in (usual, greedy_orders(stream, roles, stages, early)):
            simulation = simulate(stream, roles, orders)
            if simulation:
                found.append((simulation, stream))
    return sorted(found, key=lambda candidate: candidate[0].end)


def _with_lists(
    kind: ScheduleKind, roles: tuple[RoleWork, ...], stream: Stream, simulation: Simulation
) -> Schedule:
    steps, stages = steps_of(stream), len(simulation.orders)
    lists = [
        _with_messages(_stage_list(stream, roles, steps, simulation, stage), roles, stage, stages)
        for stage in range(stages)
    ]
    return Schedule(kind, roles, stream, steps, simulation, _with_early_receives(lists))


def forward_list(roles: Sequence[RoleWork], stage: int, stages: int) -> list[Action]:
    """Make a stage's list of forward-only passes, role after role. The pipeline fills and drains
    once. Every message goes to a later pass of the same order, so the stages cannot deadlock."""
    (stream,) = candidate_streams("sequential", roles, stages)
    passes = [_pass("forward", roles, entry) for entry in stream.entries]
    return _with_messages(passes, roles, stage, stages)


def _stage_list(
    stream: Stream,
    roles: Sequence[RoleWork],
    steps: Sequence[Step],
    simulation: Simulation,
    stage: int,
) -> list[Action]:
    """Make a stage's list of passes and of the parts of optimizer steps, without messages. "reduce"
    follows a mini-batch's last backward pass on the stage. "norm" may wait for all stages, so it is
    placed at the simulated time at which every stage has finished that pass. "step" is placed
    directly before the first forward pass that needs the updated weights."""
    norms = sorted(range(len(steps)), key=lambda k: (simulation.norm_known[k], k))
    untaken = sorted(range(len(steps)), key=lambda k: (steps[k].before, k))
    completed_by = {step.last: step for step in steps}
    actions: list[Action] = []

    def add_until(start: int | None, before: int | None) -> None:
        while norms and (start is None or simulation.norm_known[norms[0]] <= start):
            actions.append(_of_step("norm", roles, steps[norms.pop(0)]))
        while untaken and before is not None and steps[untaken[0]].before <= before:
            actions.append(_of_step("step", roles, steps[untaken.pop(0)]))

    for n in simulation.orders[stage]:
        if n >= 0:
            add_until(simulation.forward_start[stage][n], n)
            actions.append(_pass("forward", roles, stream.entries[n]))
        else:
            add_until(simulation.backward_start[stage][~n], None)
            actions.append(_pass("backward", roles, stream.entries[~n]))
            if ~n in completed_by:
                actions.append(_of_step("reduce", roles, completed_by[~n]))
    add_until(None, len(stream.entries))
    return actions


def _pass(kind: ActionKind, roles: Sequence[RoleWork], entry: StreamEntry) -> Action:
    name = roles[entry.role].name
    return Action(kind, name, entry.mini_batch, entry.micro_batch, entry.chunk)


def _of_step(kind: ActionKind, roles: Sequence[RoleWork], step: Step) -> Action:
    return Action(kind, roles[step.role].name, step.mini_batch)


def _with_messages(
    actions: Sequence[Action], roles: Sequence[RoleWork], stage: int, stages: int
) -> list[Action]:
    """Add sends and receives to a stage's list; the first stage follows the last one in the next
    chunk.

    A message is sent directly after the pass that computes it. A receive is posted directly before
    the pass that needs the message. A receive that is posted earlier would let the message arrive
    during the pass before, but a wait for the whole device within that pass (memory that is
    returned, a kernel that is launched for the first time) would then wait for the message, too.
    Receives before a "norm" are the exception: see ``_with_early_receives``.
    """
    last_chunks = {role.name: role.chunks - 1 for role in roles}
    result: list[Action] = []
    for action in actions:
        is_first = stage == 0 and action.chunk == 0
        is_last = stage == stages - 1 and action.chunk == last_chunks[action.role]
        if action.kind == "forward" and not is_first:
            result.append(action.of_kind("receive_input"))
        elif action.kind == "backward" and not is_last:
            result.append(action.of_kind("receive_gradient"))
        result.append(action)
        if action.kind == "forward" and not is_last:
            result.append(action.of_kind("send_output"))
        elif action.kind == "backward" and not is_first:
            result.append(action.of_kind("send_gradient"))
    return result


def _with_early_receives(lists: StageLists) -> StageLists:
    """Post the receives of all messages that are under way at a "norm" directly before it. A stage
    that waits for its device in "norm" waits for its sends as well. Another stage that posts their
    receives after its own "norm", and first waits for its device, would wait for the "norm" of the
    first one. A receive never precedes the step that its mini-batch needs."""
    lists = [list(actions) for actions in lists]
    number = sum(action.kind == "norm" for action in lists[0])
    for norm in range(number):
        at = [_position(actions, norm) for actions in lists]
        counts = [Counter(action.kind for action in a[:end]) for a, end in zip(lists, at)]
        for stage, actions in enumerate(lists):
            sent = {
                "receive_input": counts[stage - 1]["send_output"],
                "receive_gradient": counts[(stage + 1) % len(lists)]["send_gradient"],
            }
            steps = Counter(action.role for action in actions[: at[stage]] if action.kind == "step")
            later = actions[at[stage] :]
            early: list[Action] = []
            for kind, count in sent.items():
                due = [a for a in later if a.kind == kind][: count - counts[stage][kind]]
                for action in due:
                    if action.mini_batch > steps[action.role]:
                        break  # receives of one direction keep their order
                    early.append(action)
            if early:
                actions[at[stage] :] = [*early, *(a for a in later if a not in early)]
    return lists


def _position(actions: Sequence[Action], norm: int) -> int:
    return [at for at, action in enumerate(actions) if action.kind == "norm"][norm]
