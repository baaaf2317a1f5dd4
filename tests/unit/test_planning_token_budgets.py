"""Token budgets with which passes of two roles cost alike, within the memory of one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.planning.token_budgets import TokenCost, balanced_budgets

COST = st.floats(1e-3, 1e3)


@st.composite
def pairs(draw):
    stages = draw(st.integers(1, 4))
    return {
        name: TokenCost(draw(COST), tuple(draw(COST) for _ in range(stages)))
        for name in ("actor", "critic")
    }


@given(pairs(), st.integers(1, 100_000), st.booleans())
def test_a_chosen_budget_costs_the_same_time_or_all_the_other_s_memory(costs, budget, swapped):
    names = ("critic", "actor") if swapped else ("actor", "critic")
    one, other = names
    found = balanced_budgets({one: budget, other: None}, costs)
    assert found[one] == budget
    times = {name: found[name] * costs[name].compute for name in names}
    bytes_of = {name: [found[name] * b for b in costs[name].activations] for name in names}
    if found[other] > 1:
        assert times[other] <= times[one] * (1 + 1e-9)
        held = zip(bytes_of[other], bytes_of[one], strict=True)
        assert all(mine <= theirs * (1 + 1e-9) for mine, theirs in held)
    # one more token would cost more time or more memory
    more = {name: n + (name == other) for name, n in found.items()}
    over_time = more[other] * costs[other].compute > times[one] * (1 - 1e-9)
    mine = [more[other] * b for b in costs[other].activations]
    over_memory = any(
        m > theirs * (1 - 1e-9) for m, theirs in zip(mine, bytes_of[one], strict=True)
    )
    assert over_time or over_memory


@given(pairs(), COST)
def test_the_unit_of_costs_does_not_matter(costs, unit):
    given_budgets = {"actor": 4096, "critic": None}
    scaled = {name: replace(cost, compute=cost.compute * unit) for name, cost in costs.items()}
    found, again = (balanced_budgets(given_budgets, c)["critic"] for c in (costs, scaled))
    assert again == pytest.approx(found, abs=1)


@given(pairs())
def test_without_a_number_the_more_expensive_role_has_the_default(costs):
    found = balanced_budgets({"actor": None, "critic": None}, costs)
    dear = max(costs, key=lambda name: costs[name].compute)
    assert found[dear] == 16384
    other = next(name for name in costs if name != dear)
    assert found == balanced_budgets({dear: 16384, other: None}, costs)


def test_numbers_stay():
    costs = {name: TokenCost(1.0, (1.0,)) for name in ("actor", "critic")}
    assert balanced_budgets({"actor": 5, "critic": 7}, costs) == {"actor": 5, "critic": 7}
