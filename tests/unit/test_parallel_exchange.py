"""Plans of who sends which sequence to whom, and the bytes that they leave on a rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.batch.batch import Sequences
from mppo.batch.microbatches import MicroBatchLimits, plan_microbatches
from mppo.cpu.node_copies import first_on_node
from mppo.models.work_share import PassMoves, ranges_of
from mppo.parallel.exchange import EVERYWHERE, Moves, exchange
from mppo.parallel.layout import Layout
from mppo.parallel.partition import partition


def sequences_of(lengths, home):
    return Sequences(
        tokens_T=torch.zeros(0, dtype=torch.int64),
        cu_seqlens=torch.zeros(1, dtype=torch.int64),
        response_mask_T=torch.zeros(0),
        held_H=torch.zeros(0, dtype=torch.int64),
        lengths_B=torch.tensor(lengths),
        home_B=torch.tensor(home, dtype=torch.int32),
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 10**6))
def test_every_sequence_reaches_its_ranks_once_and_its_results_come_home(lengths, seed):
    random = torch.Generator().manual_seed(seed)
    layout = Layout(8, tp=2, pp=2)
    home = torch.randint(0, 8, (len(lengths),), generator=random).tolist()
    plan = plan_microbatches(lengths, range(len(lengths)), layout.dp, MicroBatchLimits(3))
    moves = PassMoves(layout, plan, sequences_of(lengths, home))
    outward, back = moves.outward(), moves.back()
    for rank in range(8):
        place = layout.coordinates(rank)
        came = [n for sender in range(8) for n in outward.between(sender, rank)]
        assert sorted(came) == sorted(i for part in plan[place.dp] for i in part)
        last = moves.outward(last_stage_only=True).wanted[rank]
        assert sorted(last) == (sorted(came) if place.pp == 1 else [])
        home_again = [n for sender in range(8) for n in back.between(sender, rank)]
        assert sorted(home_again) == [n for n, where in enumerate(home) if where == rank]
        for n in home_again:
            reporting = layout.coordinates(back.source[n])
            assert (reporting.pp, reporting.tp, reporting.cp) == (1, 0, 0)


def test_a_plan_within_one_rank_exchanges_nothing():
    rows = torch.arange(6).view(6, 1)
    moves = Moves([0, EVERYWHERE, 0], [[2, 0]])
    assert moves.is_local
    (got,) = exchange(moves, [1, 2, 3], [0, 1, 2], lambda _: [rows])
    assert got.flatten().tolist() == [3, 4, 5, 0]
    (same,) = exchange(Moves([0] * 3, [[0, 1, 2]]), [1, 2, 3], [0, 1, 2], lambda _: [rows])
    assert same is rows, "nothing is copied"


def test_ranges_of_a_pass_cover_its_plan():
    for count, stages, multiple in itertools.product((1, 3, 8, 50), (1, 2, 4), (1, 4)):
        plan = [[[100 * rank + i] for i in range(count * multiple)] for rank in range(2)]
        ranges = ranges_of(plan, stages, multiple)
        for rank in range(2):
            assert [one for part in ranges for one in part[rank]] == plan[rank]
        assert all(len(part[0]) % multiple == 0 for part in ranges)
        assert len(ranges) <= 8


WORLD, LAYERS, CHOSEN = 16, 46, 8
RESPONSES, TOKENS = 96 * 16, 32768


@pytest.mark.parametrize("what", ["forward", "update"])
def test_router_choices_of_long_responses_take_an_eighth_of_their_bytes(what):
    """96 x 16 responses of 32k tokens with routed experts (slime issue 2384), counted."""
    layout = Layout(WORLD, cp=2, pp=2)
    lengths = [TOKENS] * RESPONSES
    everything = RESPONSES * TOKENS * LAYERS * CHOSEN
    assert everything == pytest.approx(18.5e9, rel=2e-3)
    home = [0] * RESPONSES
    for rank, part in enumerate(partition(lengths, WORLD)):
        for number in part:
            home[number] = rank
    # an update has 8 mini-batches; a forward pass is divided into ranges
    limits = MicroBatchLimits(1)
    if what == "update":
        plan = plan_microbatches(lengths, range(RESPONSES // 8), layout.dp, limits)
    else:
        plan = plan_microbatches(lengths, range(RESPONSES), layout.dp, limits)
        plan = max(ranges_of(plan, layout.pp, 1), key=lambda part: len(part[0]))
    batch = sequences_of(lengths, home)
    moves = PassMoves(layout, plan, batch).outward()
    row = LAYERS // layout.pp * CHOSEN  # a stage's own layers

    def tokens(numbers):
        return sum(lengths[number] for number in numbers)

    nodes = [rank // 8 for rank in range(WORLD)]
    first = first_on_node(PassMoves(layout, plan, batch).alike(by_stage=True), nodes, moves.wanted)
    assert len(set(first)) == WORLD // layout.cp, "the two ranks of a sequence share one copy"
    for rank, source in enumerate(first):
        assert moves.wanted[rank] == moves.wanted[source]
        assert layout.coordinates(rank).pp == layout.coordinates(source).pp

    for rank in range(WORLD):
        held = home.count(rank) * TOKENS * LAYERS * CHOSEN
        sent = row * sum(tokens(moves.between(rank, other)) for other in range(WORLD))
        received = row * tokens(moves.wanted[rank])
        assert held + sent + 2 * received < everything / 8
