"""The gate of value pretraining: when the critic explains enough of the returns to start PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.dumps.step_dump import dumped_steps
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.schema import Recipe

MEASURES = ("critic/vf_explained_var", "critic/vf_explained_var_by_episode")
"""What must reach the threshold: the explained variance over tokens and over episodes."""
IN_A_ROW = "critic/gate_batches"
"""Metric: batches in a row that have reached it."""


@dataclass
class ValueGate:
    """Whether the explained variance has been high enough for several batches in a row.

    A batch is judged by the values from before the critic learns it. Responses that are generated
    are new in every step. Of dumps (``trainer.replay``), which come again in every pass, the last
    ``batches`` are held out: they are judged and never learnt.

    ``dumps`` are the steps of the replay; 0: responses are generated.
    """

    threshold: float
    batches: int
    dumps: int = 0
    in_a_row: int = 0

    @property
    def holds(self) -> bool:
        return self.in_a_row >= self.batches

    def holds_out(self, step: int) -> bool:
        """Whether the batch of a step is judged and not learnt."""
        return bool(self.dumps) and (step - 1) % self.dumps >= self.dumps - self.batches

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge the batch of a step by its metrics from before the update; a batch without an
        explained variance does not count. Returns ``critic/gate_batches``."""
        explained = [metrics[name] for name in MEASURES if name in metrics]
        is_new = not self.dumps or self.holds_out(step)
        if is_new and len(explained) == len(MEASURES):
            self.in_a_row = self.in_a_row + 1 if min(explained) >= self.threshold else 0
        return {IN_A_ROW: float(self.in_a_row)}

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])


def value_gate(recipe: Recipe) -> ValueGate | None:
    """The gate of a run; None if it is no value pretraining. ConfigError: a replay has too few
    steps to hold some out."""
    if not recipe.pretrains_value:
        return None
    gate, replay = recipe.trainer.value_gate, recipe.trainer.replay
    dumps = 0 if replay is None else len(dumped_steps(Path(replay)))
    if replay is not None and dumps <= gate.batches:
        why = f"as many steps of trainer.replay are held out for the gate, and it has {dumps}"
        fix = "lower it, or give more dumped steps"
        issue = ConfigIssue("trainer.value_gate.batches", gate.batches, why, fix)
        raise ConfigError([issue], "value pretraining")
    return ValueGate(gate.explained_var, gate.batches, dumps)


def describe_end(gate: ValueGate, recipe: Recipe, step: int, metrics: Mapping[str, float]) -> str:
    """What a value pretraining says at its end: whether its gate holds, and what to do next."""
    found = [f"{metrics[name]:.3f}" if name in metrics else "undefined" for name in MEASURES]
    last = f"step {step}: explained variance {found[0]} by token, {found[1]} by episode"
    key = "trainer.value_gate.explained_var"
    folder = recipe.trainer.run_dir / recipe.exported_role
    start = f"start a run with critic.path={folder}" if recipe.trainer.export_hf else ""
    if gate.holds:
        text = f"the value gate holds after {gate.batches} batches in a row: {last}"
        return f"{text}; {start}" if start else text
    text = f"the value gate does not hold: {key}={gate.threshold:g} was reached by {gate.in_a_row}"
    fix = "train longer, with a higher critic.optim.lr, or lower the threshold"
    return f"{text} of {gate.batches} batches in a row; {last}; {fix}"
