"""Simulation of a stream of micro-batches on a pipeline: start times of passes and steps.

The model: a stage computes one pass or step at a time, in its order. A forward pass can start when
the previous stage has computed its input, a backward pass when the next stage has computed the
gradient of its output; with interleaving, the first stage follows the last one in the next chunk.
An optimizer step can start when every stage has finished the gradient. Messages take no time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from mppo.pipeline.actions import RoleWork, memory_shares
from mppo.pipeline.streams import Stream

_DIGITS = 6
"""Decimal digits of the largest cost that are kept besides its first one."""


@dataclass(frozen=True)
class Costs:
    """The costs of an update's passes (``[role][stage]``, of one chunk, at least 1) and of its
    reductions and steps (``[role]``), in ticks."""

    forward: list[tuple[int, ...]]
    backward: list[tuple[int, ...]]
    reduce: list[int]
    step: list[int]
    ticks_per_unit: Fraction

    @staticmethod
    def of(roles: Sequence[RoleWork], stages: int) -> Costs:
        """Convert the costs of all roles; the same on every rank. Costs are rounded to decimal
        digits, so that 3.1 and 3 * 3.1 keep their ratio, and in such ticks that a role's passes
        divide evenly into its chunks."""
        passes = [
            [cost if isinstance(cost, tuple) else (cost,) * stages for cost in costs]
            for costs in ((role.forward, role.backward) for role in roles)
        ]
        assert all(len(costs) == stages for costs_of_role in passes for costs in costs_of_role)
        single = [cost for role in roles for cost in (role.reduce, role.step)]
        largest = max((max(map(max, costs)) for costs in passes), default=0.0)
        largest = max(largest, *single, 0.0) or 1.0
        decimal = Fraction(10) ** (_DIGITS - math.floor(math.log10(largest)))
        even = math.lcm(*(role.chunks for role in roles))

        def ticks(cost: float, chunks: int = 1) -> int:
            return round(Fraction(cost) * decimal) * even // chunks

        forward, backward = (
            [
                tuple(max(1, ticks(cost, role.chunks)) for cost in costs[direction])
                for role, costs in zip(roles, passes, strict=True)
            ]
            for direction in (0, 1)
        )
        return Costs(
            forward=forward,
            backward=backward,
            reduce=[ticks(role.reduce) for role in roles],
            step=[ticks(role.step) for role in roles],
            ticks_per_unit=decimal * even,
        )


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Args:
        costs: the costs of the passes and steps. All times are whole numbers of its ticks.
        orders: ``orders[stage]`` is the order of a stage's passes: ``n`` is the forward pass of
            entry ``n`` of the stream, ``~n`` its backward pass.
        forward_start: ``[stage][n]``, start time of the forward pass of entry ``n``.
        backward_start: ``[stage][n]``, start time of its backward pass.
        norm_known: for each step of ``steps_of``, the time at which its gradient norm is known.
        end: time at which the last stage has finished all passes and steps.
        idle_share: share of ``stages * end`` in which the stages compute nothing, 0 to 1.
        in_flight: for each stage, the largest number of micro-batches whose activations it holds;
            a micro-batch's activations in one of ``c`` chunks count as ``1 / c``.
    """

    costs: Costs
    orders: list[list[int]]
    forward_start: list[list[int]]
    backward_start: list[list[int]]
    norm_known: list[int]
    end: int
    idle_share: float
    in_flight: list[float]

    def in_units(self, ticks: int) -> float:
        return float(ticks / self.costs.ticks_per_unit)

    @property
    def makespan(self) -> float:
        return self.in_units(self.end)


@dataclass(frozen=True)
class Step:
    """An optimizer step of a stream: index of the entry with the mini-batch's last backward pass,
    and of the first whose forward pass needs the step (the number of entries if none does)."""

    role: int
    mini_batch: int
    last: int
    before: int


def steps_of(stream: Stream) -> list[Step]:
    """List the optimizer steps of a stream, in the order in which their gradients are completed."""
    last: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int], int] = {}
    for n, entry in enumerate(stream.entries):
        first.setdefault((entry.role, entry.mini_batch), n)
    for place, n in enumerate(stream.backward):
        last[stream.entries[n].role, stream.entries[n].mini_batch] = place
    steps, together = [], stream.together
    for (role, i), place in sorted(last.items(), key=lambda item: item[1]):
        following = [k for (r, j), k in first.items() if j == i + 1 and (together or r == role)]
        before = min(following, default=len(stream.entries))
        steps.append(Step(role, i, stream.backward[place], before))
    return steps


def stage_order(
    stream: Stream, roles: Sequence[RoleWork], stage: int, stages: int, early: bool = True
) -> list[int]:
    """Order the passes of one stage as 1F1B does: forward passes as early as possible. A backward
    pass precedes a forward pass only if there is no memory for a further micro-batch
    (``memory_shares``), or if the forward pass's ``after`` requires it. With ``early``, this is the
    order of Megatron's 1F1B or interleaved schedule for one role."""
    shares, whole = memory_shares(roles, stage, stages, early)
    order: list[int] = []
    done = held = 0
    for n, entry in enumerate(stream.entries):
        while done < entry.after or held + shares[entry.role] > whole:
            freed = stream.backward[done]
            order.append(~freed)
            held -= shares[stream.entries[freed].role]
            done += 1
        order.append(n)
        held += shares[entry.role]
    order.extend(~n for n in stream.backward[done:])
    return order


def simulate(
    stream: Stream, roles: Sequence[RoleWork], orders: list[list[int]]
) -> Simulation | None:
    """Simulate a stream on a pipeline; None if the stages would wait for each other for ever, which
    orders of ``stage_order`` do for some roles with different numbers of chunks."""
    return _Run(stream, roles, orders).result()


class _Run:
    def __init__(self, stream: Stream, roles: Sequence[RoleWork], orders: list[list[int]]) -> None:
        self._entries, self._roles, self.orders = stream.entries, roles, orders
        self._stages = stages = len(orders)
        self._costs = costs = Costs.of(roles, stages)
        self._forward = [[costs.forward[e.role][s] for e in self._entries] for s in range(stages)]
        self._backward = [[costs.backward[e.role][s] for e in self._entries] for s in range(stages)]
        size = len(self._entries)
        self._f_end: list[list[int | None]] = [[None] * size for _ in range(stages)]
        self._b_end: list[list[int | None]] = [[None] * size for _ in range(stages)]
        self._clock = [0] * stages
        self._next = [0] * stages
        self._steps = steps_of(stream)
        self._before: dict[int, list[int]] = {}
        for index, step in enumerate(self._steps):
            self._before.setdefault(step.before, []).append(index)
        self._norms: dict[int, int] = {}

    def result(self) -> Simulation | None:
        """Advance every stage as far as it can, repeatedly, until all orders are complete."""
        total = sum(map(len, self.orders))
        while total:
            moved = sum(self._advance(stage) for stage in range(self._stages))
            moved += sum(self._advance(stage) for stage in reversed(range(self._stages)))
            if not moved:
                return None
            total -= moved
        for stage in range(self._stages):
            for index in self._before.get(len(self._entries), ()):
                self._take_step(stage, index)
        end = max(self._clock, default=0)
        busy = sum(map(sum, self._forward)) + sum(map(sum, self._backward))
        busy += self._stages * sum(self._costs.step[step.role] for step in self._steps)
        return Simulation(
            costs=self._costs,
            orders=self.orders,
            forward_start=_starts(self._f_end, self._forward),
            backward_start=_starts(self._b_end, self._backward),
            norm_known=[self._norms[index] for index in range(len(self._steps))],
            end=end,
            idle_share=1 - busy / (self._stages * end) if end else 0.0,
            in_flight=[self._most_in_flight(order) for order in self.orders],
        )

    def _advance(self, stage: int) -> int:
        """Run the passes of a stage that are ready, in order; return how many."""
        order, begin = self.orders[stage], self._next[stage]
        at = begin
        while at < len(order):
            n = order[at]
            if not (self._run_forward(stage, n) if n >= 0 else self._run_backward(stage, ~n)):
                break
            at += 1
        self._next[stage] = at
        return at - begin

    def _run_forward(self, stage: int, n: int) -> bool:
        ready: int | None = 0
        if stage:
            ready = self._f_end[stage - 1][n]
        elif (previous := self._entries[n].previous) is not None:
            ready = self._f_end[-1][previous]
        steps = self._before.get(n, ())
        if ready is None or any(self._norm(index) is None for index in steps):
            return False
        for index in steps:
            self._take_step(stage, index)
        self._clock[stage] = max(self._clock[stage], ready) + self._forward[stage][n]
        self._f_end[stage][n] = self._clock[stage]
        return True

    def _run_backward(self, stage: int, n: int) -> bool:
        if stage < self._stages - 1:
            ready = self._b_end[stage + 1][n]
        elif (following := self._entries[n].following) is not None:
            ready = self._b_end[0][following]
        else:
            ready = self._f_end[stage][n]
        if ready is None:
            return False
        self._clock[stage] = max(self._clock[stage], ready) + self._backward[stage][n]
        self._b_end[stage][n] = self._clock[stage]
        return True

    def _take_step(self, stage: int, index: int) -> None:
        known = self._norm(index)
        assert known is not None
        cost = self._costs.step[self._steps[index].role]
        self._clock[stage] = max(self._clock[stage], known) + cost

    def _norm(self, index: int) -> int | None:
        """Time at which a step's gradient norm is known on all stages; None: not yet known."""
        if index not in self._norms:
            step = self._steps[index]
            ends = [end for row in self._b_end if (end := row[step.last]) is not None]
            if len(ends) < self._stages:
                return None
            self._norms[index] = max(ends) + self._costs.reduce[step.role]
        return self._norms[index]

    def _most_in_flight(self, order: Sequence[int]) -> float:
        whole = math.lcm(*(role.chunks for role in self._roles))
        parts = [whole // self._roles[entry.role].chunks for entry in self._entries]
        changes = (parts[n] if n >= 0 else -parts[~n] for n in order)
        return max(accumulate(changes, initial=0)) / whole


def _starts(ends: list[list[int | None]], costs: list[list[int]]) -> list[list[int]]:
    starts = []
    for row, costs_of_stage in zip(ends, costs, strict=True):
        starts.append([])
        for end, cost in zip(row, costs_of_stage, strict=True):
            assert end is not None, "a pass has not run"
            starts[-1].append(end - cost)
    return starts


def greedy_orders(
    stream: Stream, roles: Sequence[RoleWork], stages: int, early: bool = True
) -> list[list[int]]:
    """Simulate a pipeline whose stages are greedy, and return the orders (``Simulation.orders``).

    A free stage computes a backward pass if one is ready, else a forward pass if one is ready and
    the stage has memory for it (``memory_shares``). Sorted by their simulated start, all passes
    follow the passes that they depend on. The orders therefore cannot deadlock, whatever the real
    costs are.
    """
    return _Greedy(stream, roles, stages, early).orders()


class _Greedy:
    """Event-driven simulation; at an event ``(time, stage)`` the stage looks for a ready pass."""

    def __init__(self, stream: Stream, roles: Sequence[RoleWork], stages: int, early: bool) -> None:
        self._stream, self._entries = stream, stream.entries
        self._stages, self._costs = stages, Costs.of(roles, stages)
        self._memory = [memory_shares(roles, stage, stages, early) for stage in range(stages)]
        self._after = list(accumulate((entry.after for entry in self._entries), max))
        self._steps = steps_of(stream)
        self._waiting: dict[int, list[int]] = {}
        self._completed_by: dict[int, list[int]] = {}
        for index, step in enumerate(self._steps):
            self._waiting.setdefault(step.before, []).append(index)
            self._completed_by.setdefault(step.last, []).append(index)
        self._unreduced = [stages] * len(self._steps)
        self._known: list[int | None] = [None] * len(self._steps)
        size = len(self._entries)
        self._inputs: list[list[int | None]] = [[None] * size for _ in range(stages)]
        self._inputs[0] = [0 if entry.previous is None else None for entry in self._entries]
        self._gradients: list[list[int | None]] = [[None] * size for _ in range(stages)]
        self._free = [0] * stages
        self._orders: list[list[int]] = [[] for _ in range(stages)]
        self._forwards = [0] * stages
        self._backwards = [0] * stages
        self._held = [0] * stages
        self._events = [(0, stage) for stage in range(stages)]

    def orders(self) -> list[list[int]]:
        while self._events:
            now, stage = heapq.heappop(self._events)
            if self._free[stage] > now:
                continue
            if self._has_backward(stage, now):
                self._run_backward(stage, now)
            elif self._has_forward(stage, now):
                self._run_forward(stage, now)
        assert all(len(order) == 2 * len(self._entries) for order in self._orders)
        return self._orders

    def _has_backward(self, stage: int, now: int) -> bool:
        done = self._backwards[stage]
        if done == len(self._entries):
            return False
        return _reached(self._gradients[stage][self._stream.backward[done]], now)

    def _has_forward(self, stage: int, now: int) -> bool:
        n, done = self._forwards[stage], self._backwards[stage]
        if n == len(self._entries) or done < self._after[n]:
            return False
        if not _reached(self._inputs[stage][n], now):
            return False
        shares, whole = self._memory[stage]
        if self._held[stage] + shares[self._entries[n].role] > whole:
            return False
        return all(_reached(self._known[index], now) for index in self._waiting.get(n, ()))

    def _run_forward(self, stage: int, now: int) -> None:
        n = self._forwards[stage]
        entry = self._entries[n]
        role = entry.role
        steps = self._waiting.get(n, ())
        end = now + sum(self._costs.step[self._steps[index].role] for index in steps)
        end += self._costs.forward[role][stage]
        self._finish(stage, n, end)
        self._forwards[stage] = n + 1
        self._held[stage] += self._memory[stage][0][role]
        if stage + 1 < self._stages:
            self._inputs[stage + 1][n] = end
            heapq.heappush(self._events, (end, stage + 1))
        elif entry.following is None:
            self._gradients[stage][n] = end
        else:
            self._inputs[0][entry.following] = end
            heapq.heappush(self._events, (end, 0))

    def _run_backward(self, stage: int, now: int) -> None:
        n = self._stream.backward[self._backwards[stage]]
        entry = self._entries[n]
        end = now + self._costs.backward[entry.role][stage]
        self._finish(stage, ~n, end)
        self._backwards[stage] += 1
        self._held[stage] -= self._memory[stage][0][entry.role]
        if stage:
            self._gradients[stage - 1][n] = end
            heapq.heappush(self._events, (end, stage - 1))
        elif entry.previous is not None:
            self._gradients[-1][entry.previous] = end
            heapq.heappush(self._events, (end, self._stages - 1))
        for index in self._completed_by.get(n, ()):
            self._unreduced[index] -= 1
            if not self._unreduced[index]:
                known = end + self._costs.reduce[self._steps[index].role]
                self._known[index] = known
                for other in range(self._stages):
                    heapq.heappush(self._events, (known, other))

    def _finish(self, stage: int, action: int, end: int) -> None:
        self._orders[stage].append(action)
        self._free[stage] = end
        heapq.heappush(self._events, (end, stage))


def _reached(time: int | None, now: int) -> bool:
    return time is not None and time <= now
