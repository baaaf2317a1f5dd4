"""Parts that come back to the GPU while the phase before their use runs."""

from __future__ import annotations

import pytest
from test_planning_residency import (
    ALL,
    APART,
    KL,
    LARGE,
    ONE_BY_ONE,
    ROOT,
    fit_of,
    places,
    plans_of,
)
from test_recipe_checks import recipe

from mppo.planning.fit import SPARE
from mppo.planning.residency import residency, with_early_returns
from mppo.planning.verdict import planned_moments


def test_parts_come_back_a_phase_before_they_are_used():
    """Not in generation, whose memory is the engine's, nor after the weight sync."""
    chosen = recipe(KL, ONE_BY_ONE, "reward_model.path=builtin:tiny-reward")
    needed = residency(chosen, ALL)
    table = with_early_returns(needed, lambda table, phase: True)
    nobody = dict.fromkeys(("actor", "critic", "ref", "reward_model"), "")
    assert {phase: places(table, phase, "returning") for phase in table} == {
        "generation": nobody,
        "reward": nobody | {"ref": "p"},
        "forward ref": nobody | {"actor": "p"},
        "forward actor": nobody | {"critic": "p"},
        "forward critic": nobody | {"critic": "o"},
        "update critic": nobody | {"actor": "po"},
        "update actor": nobody,
        "weight sync": nobody,
        "save": nobody,
    }
    for phase in table:
        assert places(table, phase) == places(needed, phase), "what a phase uses does not change"
    assert with_early_returns(needed, lambda table, phase: False) == needed


def test_weights_come_back_before_the_optimizers_state_and_only_where_there_is_room():
    needed = residency(recipe(ONE_BY_ONE), ALL)

    def has_room(table, phase: str) -> bool:
        """Room for one part that comes back early."""
        return len("".join(places(table, phase, "returning").values())) <= 1

    table = with_early_returns(needed, has_room)
    assert places(table, "update critic", "returning") == {"actor": "p", "critic": ""}
    assert places(table, "update critic", "host") == {"actor": "o", "critic": ""}


@pytest.mark.parametrize(("gib", "all_come"), [(79.2, True), (45, False)])
def test_parts_come_back_early_wherever_the_gpu_has_room(gib, all_come):
    every = "{parameters: true, gradients: true, optimizer: true}"
    both = [f"{role}.megatron.offload={every}" for role in ("actor", "critic")]
    fit = fit_of(gib, LARGE, *APART, *both)
    chosen, _ = plans_of(ROOT / "recipes" / f"{LARGE}.yaml", *APART)
    possible = with_early_returns(residency(chosen, fit.offload), lambda table, phase: True)

    def has_room(table, phase: str) -> bool:
        sizes = [
            moment.total
            for use in fit.uses.values()
            for one, moment in zip(use.uses, planned_moments(use, table, fit.engine, table))
            if one.phase == phase
        ]
        return max(sizes) <= (1 - SPARE) * fit.gpu.nbytes

    stay = []
    for phase, roles in possible.items():
        for role, parts in roles.items():
            for part in (part for part, place in parts.items() if place == "returning"):
                if fit.table[phase][role][part] == "returning":
                    assert has_room(fit.table, phase)
                else:
                    stay.append((phase, role, part))
                    more = {**fit.table[phase], role: {**fit.table[phase][role], part: "returning"}}
                    assert not has_room({**fit.table, phase: more}, phase)
    assert (not stay) == all_come
    assert fit.table != residency(chosen, fit.offload), "something comes back early"
