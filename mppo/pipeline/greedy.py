"""Greedy stage orders: in a simulated pipeline, each stage computes the next pass that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from mppo.pipeline.actions import RoleWork, memory_shares
from mppo.pipeline.simulation import Costs, steps_of
from mppo.pipeline.streams import Stream


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
