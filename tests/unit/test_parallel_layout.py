"""Layout arithmetic: coordinates enumerate the ranks, bad sizes are refused."""

from __future__ import annotations

import itertools

import pytest

from mppo.parallel.layout import Layout


@pytest.mark.parametrize(
    "layout", [Layout(16, tp=2, pp=2, cp=2), Layout(8, tp=2, ep=4, etp=1), Layout(6, pp=3)]
)
def test_coordinates_are_a_bijection(layout):
    seen = [layout.coordinates(rank) for rank in range(layout.world)]
    dense = {(c.tp, c.cp, c.dp, c.pp) for c in seen}
    experts = {(c.etp, c.ep, c.edp, c.pp) for c in seen}
    axes = (layout.tp, layout.cp, layout.dp, layout.pp)
    expert_axes = (layout.etp, layout.ep, layout.edp, layout.pp)
    assert dense == set(itertools.product(*map(range, axes)))
    assert experts == set(itertools.product(*map(range, expert_axes)))


def test_tensor_ranks_are_neighbours_and_stages_far_apart():
    layout = Layout(8, tp=2, pp=2)
    assert [layout.coordinates(r).tp for r in range(4)] == [0, 1, 0, 1]
    assert [layout.coordinates(r).pp for r in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("axes", [{"tp": 3}, {"tp": 2, "pp": 3}, {"ep": 3}, {"cp": 5}])
def test_axes_that_do_not_fit(axes):
    with pytest.raises(ValueError, match="world size 8 is not a multiple of"):
        Layout(8, **axes)


def test_description():
    assert Layout(4, tp=2, pp=2).describe() == "TP2 x PP2"
    assert Layout(1).describe() == "DP1"
    assert Layout(8, ep=4).describe() == "EP4 x ETP1 x DP8"
    assert Layout(8, tp=2, etp=2).describe() == "TP2 x DP4"
    assert Layout(8, tp=4, etp=2).describe() == "TP4 x ETP2 x DP2"


def test_bubble_shrinks_with_microbatches_and_interleaving():
    assert Layout(8).bubble_fraction(8) == 0.0
    assert Layout(4, pp=4).bubble_fraction(4) == 3 / 7
    assert Layout(4, pp=4, vpp=3).bubble_fraction(4) == 1 / 5
