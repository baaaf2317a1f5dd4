"""The predicted time of a step as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from mppo.planning.fit import Fit
from mppo.planning.run_plan import RolePlan, with_token_budgets
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.library import open_library
from mppo.planning.time.recipe import recipe_load, recipe_sequences
from mppo.planning.time.role_load import ONE_TURN, AgentTurns, StepSequences
from mppo.planning.time.step import Phase, Prediction, StepLoad, predict_step
from mppo.planning.time.upkeep import (
    CHECKPOINTS,
    NOT_COUNTED,
    VALIDATION,
    Upkeep,
    check_upkeep,
    upkeep_phases,
)
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.gpu_types import GpuType
from mppo.recipe.schema import Recipe

_ASSUMED = "The trainer is taken to run with Transformer Engine, the engine to be SGLang."


@dataclass(frozen=True)
class TimeOptions:
    """What is asked of a prediction.

    Args:
        prompt: mean tokens of a prompt; None: the recipe's limit.
        response: the same of a response.
        search: file for the recipe with the fastest layout; None: no search.
        lengths: a run's dumped steps, whose lengths the sequences have; None: of the means.
        upkeep: what of validation and checkpoints is counted.
    """

    prompt: float | None = None
    response: float | None = None
    price: float | None = None
    search: Path | None = None
    picture: Path | None = None
    lengths: Path | None = None
    turns: AgentTurns = ONE_TURN
    upkeep: Upkeep = NOT_COUNTED


@dataclass(frozen=True)
class Timing:
    """What a plan needs to predict the time of a step."""

    sequences: StepSequences
    kernels: Kernels
    options: TimeOptions

    @staticmethod
    def of(recipe: Recipe, gpu: GpuType, options: TimeOptions) -> Timing:
        """Check the options and load the measured kernels; ConfigError if the library is not
        installed, or an option is wrong."""
        means = (options.prompt, options.response)
        sequences = recipe_sequences(recipe, *means, options.lengths, options.turns)
        check_upkeep(recipe, options.upkeep)
        price = options.price
        if price is not None and not 0 < price < float("inf"):
            why = "it is not the price of a GPU for an hour"
            raise ConfigError([ConfigIssue("--price", price, why, "give a number above 0")])
        return Timing(sequences, open_library(gpu), options)

    def predict(
        self, recipe: Recipe, plans: Sequence[RolePlan], fit: Fit, hf_configs: Mapping[str, Any]
    ) -> tuple[StepLoad, Prediction]:
        recipe = with_token_budgets(recipe, plans[0].layout.world, hf_configs)
        load = recipe_load(recipe, plans, fit, hf_configs, self.sequences)
        found = predict_step(load, self.kernels)
        upkeep = upkeep_phases(
            recipe, plans, load, self.kernels, self.options.upkeep, found.seconds
        )
        return load, replace(found, phases=(*found.phases, *upkeep))


def describe_prediction(load: StepLoad, prediction: Prediction, price: float | None = None) -> str:
    sequences = load.sequences
    lengths = f"{sequences.prompt:,.0f} + {sequences.response:,.0f}"
    rows = [("phase", "predicted s", "share", "MFU", "bound by")]
    whole = sum(phase.seconds for phase in prediction.phases)
    rows += [_row(prediction, phase, whole) for phase in prediction.phases]
    together = " (generation beside the rest)" if prediction.overlapped else ""
    return "\n".join(
        [
            f"# predicted time of a step of {sequences.count:,} sequences of {lengths} tokens "
            f"(mean prompt + response, at most {sequences.longest:,})",
            columns(rows),
            f"predicted step: {prediction.seconds:.1f} s{together}, "
            f"{prediction.throughput:,.0f} tokens/s/GPU on {prediction.gpus} GPUs",
            _use(prediction),
            *([] if price is None else [_cost(prediction, price)]),
            f"predicted by formulas from {prediction.source}.",
            fill(f"{_ASSUMED} {_uncounted(load, prediction)}", 100),
        ]
    )


def _uncounted(load: StepLoad, prediction: Prediction) -> str:
    names = {phase.name for phase in prediction.phases}
    missing = ["rewards"]
    missing += [] if load.sequences.turns.seconds else ["agents"]
    missing += [name for name in (VALIDATION, CHECKPOINTS) if name not in names]
    *rest, last = missing
    text = f"{', '.join(rest)} and {last}" if rest else last
    return f"{text.capitalize()} are not counted."


def _use(prediction: Prediction) -> str:
    """MFU by role, and what GPUs wait for."""
    use = prediction.role_utilization()
    roles = ", ".join(f"{name} {share:.0%}" for name, share in use.items())
    idle = prediction.idle()
    waits = ", ".join(f"{kind} {share:.0%}" for kind, share in idle.items() if share >= 0.005)
    return (
        f"predicted MFU: {roles}; GPUs wait for {sum(idle.values()):.0%} of the step"
        f"{f' ({waits})' if waits else ''}"
    )


def _cost(prediction: Prediction, price: float) -> str:
    cost = prediction.gpu_hours * price
    million = 1e6 * cost / prediction.tokens
    return (
        f"predicted cost: {cost:,.2f} a step, {million:,.2f} per million tokens "
        f"({prediction.gpu_hours:.3g} GPU hours at {price:,.2f})"
    )


def _row(prediction: Prediction, phase: Phase, whole: float) -> tuple[str, ...]:
    use = prediction.utilization(phase)
    bound = max(phase.spent.values()) / phase.seconds if phase.seconds else 0.0
    return (
        phase.name,
        f"{phase.seconds:.1f}",
        f"{phase.seconds / whole:.0%}",
        "-" if use is None else f"{use:.0%}",
        f"{phase.bound} {bound:.0%}",
    )


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
