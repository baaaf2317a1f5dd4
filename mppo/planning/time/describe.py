"""The predicted time of a step as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.config.gpu_types import GpuType
from mppo.config.schema import Recipe
from mppo.planning.fit import Fit
from mppo.planning.plan import RolePlan, with_token_budgets
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.library import open_library
from mppo.planning.time.recipe import recipe_load, recipe_sequences
from mppo.planning.time.role_load import StepSequences
from mppo.planning.time.step import Phase, Prediction, StepLoad, predict_step

_ASSUMED = (
    "The trainer is taken to run with Transformer Engine, the engine to be SGLang. Rewards, "
    "agents,\nvalidation and checkpoints are not counted."
)


@dataclass(frozen=True)
class Timing:
    """What a plan needs to predict the time of a step.

    Args:
        sequences: the sequences of a step.
        kernels: the GPU.
    """

    sequences: StepSequences
    kernels: Kernels

    @staticmethod
    def of(recipe: Recipe, gpu: GpuType, means: tuple[float | None, float | None]) -> Timing:
        """Check the options and load the measured kernels.

        Args:
            recipe: a valid recipe.
            gpu: the type of the GPU.
            means: mean tokens of a prompt and of a response; None: the recipe's limits.

        Raises:
            ConfigError: the library is not installed, or a mean is wrong.
        """
        return Timing(recipe_sequences(recipe, *means), open_library(gpu))

    def describe(
        self, recipe: Recipe, plans: Sequence[RolePlan], fit: Fit, hf_configs: Mapping[str, Any]
    ) -> str:
        """Predict and describe the time of a step.

        Args:
            recipe: the recipe.
            plans: its roles (``plan_roles``).
            fit: what is offloaded.
            hf_configs: Hugging Face config object of each role's model, by role.

        Returns:
            A table of phases and totals, each called predicted.
        """
        recipe = with_token_budgets(recipe, plans[0].layout.world, hf_configs)
        load = recipe_load(recipe, plans, fit, hf_configs, self.sequences)
        return describe_prediction(load, predict_step(load, self.kernels))


def describe_prediction(load: StepLoad, prediction: Prediction) -> str:
    """Describe a prediction.

    Args:
        load: what the step computes.
        prediction: its predicted time.
    """
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
            _columns(rows),
            f"predicted step: {prediction.seconds:.1f} s{together}, "
            f"{prediction.throughput:,.0f} tokens/s/GPU on {prediction.gpus} GPUs",
            f"predicted by formulas from {prediction.source}.",
            _ASSUMED,
        ]
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


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
