"""Greedy stage orders: in a simulated pipeline, each stage computes the next pass that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from mppo.pipeline.actions import RoleWork
from mppo.pipeline.simulation import steps_of
from mppo.pipeline.streams import Stream


def greedy_orders(
    stream: Stream, roles: Sequence[RoleWork], stages: int, together: bool
) -> list[list[int]]:
    """Simulate a pipeline whose stages are greedy, and return the order of each stage's passes.

    A free stage computes a backward pass if one is ready, else a forward pass if one is ready and
    the stage then holds no more micro-batches than under 1F1B.

    Sorted by their simulated start, all passes follow the passes that they depend on. The orders
    therefore cannot deadlock, whatever the real costs are.

    Args:
        stream, roles, together: see ``simulate``.
        stages: number of pipeline stages.

    Returns:
        The order of each stage, in the form of ``Simulation.orders``.
    """
    return _Greedy(stream, roles, stages, together).orders()


class _Greedy:
    """Event-driven simulation; at an event ``(time, stage)`` the stage looks for a ready pass."""

    def __init__(
        self, stream: Stream, roles: Sequence[RoleWork], stages: int, together: bool
    ) -> None:
        self._stream, self._roles, self._stages = stream, roles, stages
        self._costs = [role.costs(stages) for role in roles]
        self._after = list(accumulate((entry.after for entry in stream), max))
        self._steps = steps_of(stream, together)
        self._waiting: dict[int, list[int]] = {}
        self._completed_by: dict[int, list[int]] = {}
        for index, step in enumerate(self._steps):
            self._waiting.setdefault(step.before, []).append(index)
            self._completed_by.setdefault(step.last, []).append(index)
        self._unreduced = [stages] * len(self._steps)
        self._known: list[float | None] = [None] * len(self._steps)
        self._inputs = [[0.0] * len(stream), *([] for _ in range(stages - 1))]
        self._gradients: list[list[float]] = [[] for _ in range(stages)]
        self._free = [0.0] * stages
        self._orders: list[list[int]] = [[] for _ in range(stages)]
        self._forwards = [0] * stages
        self._backwards = [0] * stages
        self._events = [(0.0, stage) for stage in range(stages)]

    def orders(self) -> list[list[int]]:
        """Process all events and return the order of each stage's passes."""
        while self._events:
            now, stage = heapq.heappop(self._events)
            if self._free[stage] > now:
                continue
            if self._has_backward(stage, now):
                self._run_backward(stage, now)
            elif self._has_forward(stage, now):
                self._run_forward(stage, now)
        assert all(len(order) == 2 * len(self._stream) for order in self._orders)
        return self._orders

    def _has_backward(self, stage: int, now: float) -> bool:
        n, ready = self._backwards[stage], self._gradients[stage]
        return n < len(ready) and ready[n] <= now

    def _has_forward(self, stage: int, now: float) -> bool:
        n, done = self._forwards[stage], self._backwards[stage]
        if n >= len(self._inputs[stage]) or self._inputs[stage][n] > now:
            return False
        if n - done >= self._stages - stage or done < self._after[n]:
            return False
        known = (self._known[index] for index in self._waiting.get(n, ()))
        return all(time is not None and time <= now for time in known)

    def _run_forward(self, stage: int, now: float) -> None:
        n = self._forwards[stage]
        role = self._stream[n].role
        steps = self._waiting.get(n, ())
        end = now + sum(self._roles[self._steps[index].role].step for index in steps)
        end += self._costs[role][0][stage]
        self._finish(stage, n, end)
        self._forwards[stage] = n + 1
        if stage + 1 < self._stages:
            self._inputs[stage + 1].append(end)
            heapq.heappush(self._events, (end, stage + 1))
        else:
            self._gradients[stage].append(end)

    def _run_backward(self, stage: int, now: float) -> None:
        n = self._backwards[stage]
        end = now + self._costs[self._stream[n].role][1][stage]
        self._finish(stage, ~n, end)
        self._backwards[stage] = n + 1
        if stage:
            self._gradients[stage - 1].append(end)
            heapq.heappush(self._events, (end, stage - 1))
        for index in self._completed_by.get(n, ()):
            self._unreduced[index] -= 1
            if not self._unreduced[index]:
                known = end + self._roles[self._steps[index].role].reduce
                self._known[index] = known
                for other in range(self._stages):
                    heapq.heappush(self._events, (known, other))

    def _finish(self, stage: int, action: int, end: float) -> None:
        self._orders[stage].append(action)
        self._free[stage] = end
        heapq.heappush(self._events, (end, stage))
