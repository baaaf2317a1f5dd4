"""The peaks of a simulated rank as moments for the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from mppo.planning.outside import Engine, outside_bytes
from mppo.planning.residency import (
    GENERATION,
    WEIGHT_SYNC,
    Part,
    phase_of_role,
    used_parts,
)
from mppo.planning.verdict import CHECKPOINT, Moment, beside_trainer
from mppo.recipe.schema import Recipe
from mppo_simulate.rank import PhaseResult, RankResult

ROLES = ("actor", "critic", "ref", "reward_model")
PURPOSES: dict[Part, tuple[str, ...]] = {
    "parameters": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("main weights", "moments"),
}
"""Purposes of a role's parts in the ledger."""


def simulated_moments(result: RankResult, recipe: Recipe, engine: Engine | None) -> list[Moment]:
    """The peaks of all phases from the second step on, and of generation.

    Args:
        result: the simulated rank.
        recipe: the recipe.
        engine: the engine on the same GPU.
    """
    outside = outside_bytes(result.communicators)
    waiting = PhaseResult(GENERATION, result.resident.total(), result.resident)
    phases = [replace(phase, peak=result.lasting_peak(phase)) for phase in result.phases]
    return [_moment(phase, recipe, outside, engine) for phase in (*phases, waiting)]


def table_phase(name: str, recipe: Recipe) -> str | None:
    """The phase of the table to which a simulated phase belongs; None: to no single one."""
    kind, *words = name.replace(",", "").split()
    role = next((role for role in ROLES if role in words), None)
    if name in (GENERATION, WEIGHT_SYNC):
        return name
    if kind == "building" or name == CHECKPOINT:  # the roles that are built wait as in generation
        return GENERATION
    if kind == "computing":
        return "forward" if role is None else phase_of_role(recipe, "forward", role)
    if kind in ("updating", "stepping"):
        return "update" if role is None else phase_of_role(recipe, "update", role)
    return None


def _moment(
    phase: PhaseResult, recipe: Recipe, outside: Mapping[str, int], engine: Engine | None
) -> Moment:
    words = phase.name.replace(",", "").split()
    role = next((role for role in ROLES if role in words), None)
    where = table_phase(phase.name, recipe)
    used = used_parts(recipe)[where] if where is not None else {}
    parts = {name: found for name in ROLES if (found := _parts(name, phase.composition))}
    idle = {
        name: sum(size for part, size in sizes.items() if part not in used.get(name, ()))
        for name, sizes in parts.items()
        if where is not None and not (words[0] == "building" and name == role)
    }
    return Moment(
        phase.name,
        phase.peak,
        beside_trainer(phase.name, outside, engine),
        {name: sum(sizes.values()) for name, sizes in parts.items()},
        idle,
        role,
        phase.composition[phase.name],
        words[0] == "updating",
    )


def _parts(name: str, composition: Counter[str]) -> dict[Part, int]:
    """Bytes of a role's parts at a moment."""
    sizes: dict[Part, int] = {
        part: sum(composition[f"{name} {purpose}"] for purpose in purposes)
        for part, purposes in PURPOSES.items()
    }
    return {part: size for part, size in sizes.items() if size}
