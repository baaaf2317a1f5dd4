"""What validation and checkpoints add to a step, on average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mppo.planning.checkpoint_space import checkpoint_bytes, host_copy_bytes
from mppo.planning.run_plan import RolePlan
from mppo.planning.time.collective_time import EFFICIENCY
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.step import Phase, StepLoad, predict_generation
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.schema import Recipe

VALIDATION, CHECKPOINTS = "validation", "checkpoints"


@dataclass(frozen=True)
class Upkeep:
    """What the shares of validation and checkpoints follow from.

    Args:
        prompts: prompts of a validation; None: it is not counted.
        disk: bytes per second that all ranks write together; None: checkpoints are not counted.
    """

    prompts: int | None = None
    disk: float | None = None


NOT_COUNTED = Upkeep()


def check_upkeep(recipe: Recipe, upkeep: Upkeep) -> None:
    """Raise ConfigError for a number that is none, or for what the recipe never does."""
    trainer = recipe.trainer
    given = (
        ("--val-prompts", upkeep.prompts, "trainer.test_freq", trainer.test_freq, "validates"),
        ("--disk", upkeep.disk, "trainer.save_freq", trainer.save_freq, "saves"),
    )
    issues: list[ConfigIssue] = []
    for option, value, key, frequency, does in given:
        if value is None:
            continue
        if not 0 < value < float("inf"):
            issues.append(ConfigIssue(option, value, "it is not above 0", "correct it"))
        elif frequency <= 0:
            why = f"{key} = {frequency}: the run never {does} by steps"
            issues.append(ConfigIssue(option, value, why, f"set {key}, or remove the option"))
    if issues:
        raise ConfigError(issues)


def upkeep_phases(
    recipe: Recipe,
    plans: Sequence[RolePlan],
    load: StepLoad,
    kernels: Kernels,
    upkeep: Upkeep,
    step: float,
) -> Iterator[Phase]:
    """The share of each in a step that takes ``step`` seconds without them."""
    trainer, world = recipe.trainer, plans[0].layout.world
    if upkeep.prompts is not None:
        samples = recipe.rollout.val_kwargs.n
        count = upkeep.prompts * samples
        validated = replace(load.sequences, count=count, samples=samples)
        whole = predict_generation(replace(load, sequences=validated), kernels)
        spent = {kind: seconds / trainer.test_freq for kind, seconds in whole.spent.items()}
        yield Phase(VALIDATION, whole.seconds / trainer.test_freq, spent, whole.gpus)
    if upkeep.disk is not None:
        ranks = min(trainer.n_gpus_per_node or world, world)
        copied = host_copy_bytes(recipe, list(plans)) / ranks / (EFFICIENCY * kernels.system.host)
        written = checkpoint_bytes(recipe, list(plans)) / upkeep.disk
        steps = trainer.save_freq
        # in the background it takes the steps until the next save, which waits for it
        beside = steps * step if trainer.async_save else 0.0
        spent = {"host": copied / steps, "disk": max(0.0, written - beside) / steps}
        yield Phase(CHECKPOINTS, sum(spent.values()), spent, world)
