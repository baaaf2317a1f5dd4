"""Token budgets of actor and critic during a run, corrected by the measured times of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mppo.models.role import Role
from mppo.parallel.collectives import all_gather_objects
from mppo.pipeline.actions import COMPUTE
from mppo.pipeline.timeline import Event
from mppo.planning.token_budgets import TokenCost, balanced_budgets

MEASURED_UPDATES = 2
"""Updates whose times correct the budgets. The first update of a process is not measured, because
libraries prepare themselves in it."""


class SlotBalance:
    """The token budgets of a recipe with ``ppo_max_token_len_per_gpu: auto`` (``given`` None),
    which this object sets as ``token_budget`` of the roles."""

    def __init__(
        self,
        given: Mapping[str, int | None],
        costs: Mapping[str, TokenCost],
        roles: Mapping[str, Role],
    ) -> None:
        self._given, self._costs, self._roles = given, costs, roles
        self._start = balanced_budgets(given, costs)
        self._seconds = dict.fromkeys(given, 0.0)
        self._tokens = dict.fromkeys(given, 0.0)
        self._measured, self._warm = 0, False
        self.budgets: dict[str, int] = {}
        self._choose()

    @property
    def wants_times(self) -> bool:
        """Whether the next update of both roles should be recorded."""
        return self._warm and self._measured < MEASURED_UPDATES

    def after_update(self, events: Sequence[Event], tokens: Mapping[str, int]) -> None:
        """Correct the budgets after an update of both roles by one stream, by this rank's actions
        (read only if ``wants_times``) and tokens over all data-parallel ranks. Collective."""
        measures, self._warm = self.wants_times, True
        if not measures:
            return
        mine = dict.fromkeys(self._given, 0.0)
        for event in events:
            if event.action.kind in COMPUTE:
                mine[event.action.role] += event.end - event.start - event.waited
        everywhere = all_gather_objects(mine)  # so that all ranks choose the same budgets
        for name in self._given:
            layout = self._roles[name].layout
            self._seconds[name] += sum(one[name] for one in everywhere) / len(everywhere)
            self._tokens[name] += tokens[name] / (layout.dp * layout.cp)
        self._measured += 1
        self._choose()

    def metrics(self) -> dict[str, float]:
        return {f"perf/token_budget/{name}": float(n) for name, n in self.budgets.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": dict(self._start),
            "seconds": dict(self._seconds),
            "tokens": dict(self._tokens),
            "measured": self._measured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved state, unless recipe, models or layouts have changed the start."""
        if state["start"] == self._start:
            self._seconds, self._tokens = dict(state["seconds"]), dict(state["tokens"])
            self._measured = int(state["measured"])
            self._choose()

    def _choose(self) -> None:
        """Set the budgets of the estimated or, once there are some, of the measured costs."""
        costs = dict(self._costs)
        if self._measured:
            for name, cost in costs.items():
                costs[name] = replace(cost, compute=self._seconds[name] / self._tokens[name])
        self.budgets = balanced_budgets(self._given, costs)
        for name, budget in self.budgets.items():
            self._roles[name].token_budget = budget
