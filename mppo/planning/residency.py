"""Who is where in which phase: the table of the parts of roles on the device and in host memory, by
phase in order of time. ``mppo.trainer`` carries it out; the plan counts memory by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Literal

from mppo.recipe.schedule_kind import forward_groups, update_groups
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.megatron import Offload
from mppo.recipe.sections.role_config import RoleConfig

Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "returning", "host", "freed"]
"""A part that is returning is on the device, or on its way there, for the next phase."""
Residency = Mapping[str, Mapping[str, Mapping[Part, Place]]]
"""Place of each part that a role has, by phase and role."""
ON_DEVICE: tuple[Place, ...] = ("device", "returning")

TRAINED_PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
FROZEN_PARTS: tuple[Part, ...] = ("parameters",)
SAVED_PARTS: tuple[Part, ...] = ("parameters", "optimizer")
GENERATION, REWARD = "generation", "reward"
WEIGHT_SYNC, SAVE = "weight sync", "save"


def residency(recipe: Recipe, offload: Mapping[str, Offload]) -> Residency:
    """The place of each part of each role in each phase.

    A part that is not offloaded is always on the device. An offloaded part is on the device in the
    phases that use it; in the others, gradients are freed, and everything else is in host memory.

    The phases of an iteration are "generation" (also validation; a role that has been built waits
    as in it), "reward" (the reward model scores responses), "forward", "update", "weight sync"
    (also an export), and "save" (a checkpoint is loaded; it is written from where the parts are).
    Where roles run one after another, each has a phase of its own, such as "forward ref" and
    "update actor" (``forward_groups``, ``update_groups``).
    """
    table: dict[str, dict[str, dict[Part, Place]]] = {}
    for phase, used in used_parts(recipe).items():
        table[phase] = {}
        for role in recipe.roles():
            wanted, chosen = used.get(role.name, ()), offload[role.name]
            table[phase][role.name] = {
                part: _place(part, getattr(chosen, part), part in wanted)
                for part in role_parts(role)
            }
    return table


def with_early_returns(table: Residency, fits: Callable[[Residency, str], bool]) -> Residency:
    """The table in which parts come back a phase before they are used, where memory allows it.

    Their copies then run beside the passes of that phase. The engine has the memory that generation
    leaves, and gradients are not copied: nothing comes back in generation, and no gradients do.
    """
    for phase, role, part in _early_returns(table):
        places: dict[Part, Place] = {**table[phase][role], part: "returning"}
        candidate: Residency = {**table, phase: {**table[phase], role: places}}
        if fits(candidate, phase):
            table = candidate
    return table


def _early_returns(table: Residency) -> Iterator[tuple[str, str, Part]]:
    """Phase, role and part of everything that could come back early; the weights first, since the
    passes need them at once, and the optimizer's state only after the passes."""
    phases = [phase for phase in table if phase not in (GENERATION, SAVE)]
    for phase, following in pairwise(phases):
        for part in SAVED_PARTS:
            for role, places in table[phase].items():
                if places.get(part) == "host" and table[following][role][part] == "device":
                    yield phase, role, part


def used_parts(recipe: Recipe) -> dict[str, dict[str, tuple[Part, ...]]]:
    """The parts that each phase needs on the device, by phase and role; phases in order of time."""
    trained = [name for group in update_groups(recipe) for name in group]
    used: dict[str, dict[str, tuple[Part, ...]]] = {GENERATION: {}}
    for phase, group in _phases(recipe, "forward").items():
        used[phase] = dict.fromkeys(group, FROZEN_PARTS)
    for phase, group in _phases(recipe, "update").items():
        used[phase] = dict.fromkeys(group, TRAINED_PARTS)
    used[WEIGHT_SYNC] = dict.fromkeys(("actor", recipe.exported_role), FROZEN_PARTS)
    used[SAVE] = dict.fromkeys(trained, SAVED_PARTS)
    return used


def role_parts(role: RoleConfig) -> tuple[Part, ...]:
    return TRAINED_PARTS if role.trained else FROZEN_PARTS


def phase_of_role(recipe: Recipe, kind: Literal["forward", "update"], role: str) -> str:
    return next(name for name, group in _phases(recipe, kind).items() if role in group)


def _phases(recipe: Recipe, kind: Literal["forward", "update"]) -> dict[str, tuple[str, ...]]:
    groups = forward_groups(recipe) if kind == "forward" else update_groups(recipe)
    named = {kind if len(group) > 1 else " ".join((kind, *group)): group for group in groups}
    if kind == "forward" and recipe.reward_model.in_use:
        return {REWARD: ("reward_model",), **named}
    return named


def _place(part: Part, offloaded: bool, used: bool) -> Place:
    if used or not offloaded:
        return "device"
    return "freed" if part == "gradients" else "host"
