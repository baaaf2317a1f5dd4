"""Schedules: the lists of every stage keep their rules, and take the time that is promised."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.schedule import forward_list, make_schedule
from mppo.pipeline.schedule_checks import (
    ScheduleFault,
    check_lists,
    check_schedule,
    checked_schedule,
)
from mppo.pipeline.stage_events import hang_of
from mppo.pipeline.streams import KINDS

TABLE = {
    (2, 2): (0.333, 0.200, 0.059, 1.41),
    (4, 4): (0.429, 0.273, 0.086, 1.60),
    (8, 4): (0.636, 0.467, 0.333, 1.83),
    (8, 8): (0.467, 0.304, 0.099, 1.69),
    (8, 16): (0.304, 0.179, 0.052, 1.36),
    (16, 16): (0.484, 0.319, 0.105, 1.73),
}
"""Idle share of each kind and sequential time over flush-free time, by stages and micro-batches:
four mini-batches, equal models, a backward pass of twice a forward pass's cost."""


@pytest.mark.parametrize(("stages", "count"), TABLE)
def test_idle_shares_of_equal_models(stages, count):
    work = tuple(RoleWork(name, (count,) * 4) for name in ("critic", "actor"))
    sequential, fused, free = (make_schedule(kind, work, stages).simulation for kind in KINDS)
    shares = [round(s.idle_share, 3) for s in (sequential, fused, free)]
    ratio = round(sequential.makespan / free.makespan, 2)
    assert (*shares, ratio) == TABLE[stages, count]


COSTS = st.integers(1, 80).map(lambda tenths: tenths / 10)
"""As floats, sums of such costs differ in their last digits where the sums are equal."""

REFUSED_WITH_FLOATS = (
    2,
    (
        RoleWork("critic", (2, 1, 6, 2), 1.0, 3.0),
        RoleWork("actor", (1, 1, 2, 2), (2.1, 2.5), (4.2, 5.0), reduce=0.3),
    ),
)


@st.composite
def updates(draw, most_chunks: int = 1):
    """Stages, and one or two roles with micro-batches, chunks and costs of their own."""
    stages = draw(st.integers(1, 6) if most_chunks == 1 else st.integers(2, 8))
    roles = []
    for name in draw(st.sampled_from([("critic",), ("critic", "actor")])):
        per_stage = st.tuples(*[COSTS] * stages)
        chunks = draw(st.integers(1, most_chunks))
        # an interleaved pipeline takes groups of as many micro-batches as there are stages
        counts = st.integers(1, 7) if chunks == 1 else st.integers(1, 2).map(stages.__mul__)
        roles.append(
            RoleWork(
                name,
                tuple(draw(st.lists(counts, min_size=1, max_size=5 if most_chunks == 1 else 3))),
                draw(COSTS | per_stage),
                draw(COSTS | per_stage),
                draw(st.just(0.0) | COSTS),
                draw(st.just(0.0) | COSTS),
                chunks,
            )
        )
    return stages, tuple(roles)


def check_kinds(update) -> None:
    """Check the lists of every kind for an update, and that no kind is slower than the previous.

    A list that survives more waits is preferred even if it is 10% slower. Where every list of a
    kind could hang, the sequential schedule runs.
    """
    stages, roles = update
    spans = []
    for kind in KINDS:
        schedule = make_schedule(kind, roles, stages)
        check_lists(schedule)
        check_schedule(checked_schedule(kind, roles, stages)[0])
        spans.append(schedule.simulation.makespan)
        for stage, held in enumerate(schedule.simulation.in_flight):
            assert held <= max(r.most_in_flight(stage, stages) / r.chunks for r in roles)
    sequential, fused, free = spans
    assert free <= 1.1 * fused
    assert fused <= 1.1 * sequential


MESSAGES_CROSS_THE_NORM = (
    6,
    (
        RoleWork("critic", (1,), 0.1, 0.1, reduce=1.4),
        RoleWork("actor", (3,), 0.1, (0.1, 0.3, 0.2, 0.1, 0.1, 0.1)),
    ),
)
"""The "norm" of the critic lies between messages of the actor on some stages."""


@settings(max_examples=120)
@given(updates())
@example(REFUSED_WITH_FLOATS)
@example(MESSAGES_CROSS_THE_NORM)
def test_lists_of_any_update_keep_their_rules_and_get_no_slower(update):
    check_kinds(update)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "count"), TABLE)
def test_no_wait_for_the_device_in_a_pass_or_a_norm_hangs(kind, stages, count):
    work = tuple(RoleWork(name, (count,) * 3) for name in ("critic", "actor"))
    assert hang_of(make_schedule(kind, work, stages).lists, work, "device") is None


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_is_under_way_at_a_norm(kind):
    stages, work = MESSAGES_CROSS_THE_NORM
    lists = make_schedule(kind, work, stages).lists
    for left, right in pairwise(lists):
        for norm in (action for action in left if action.kind == "norm"):
            before = [Counter(a.kind for a in x[: x.index(norm)]) for x in (left, right)]
            assert before[0]["send_output"] == before[1]["receive_input"]
            assert before[1]["send_gradient"] == before[0]["receive_gradient"]


@pytest.mark.parametrize("factor", [0.1, 3.1, 1e-9, 7e12])
def test_the_unit_of_costs_changes_no_list(factor):
    """Also with a backward pass of three times 3.1, which as a float is not 9.3."""
    counts = ((2, 1, 6, 2), (1, 1, 2, 2))

    def lists(unit: float):
        costs = [(unit, 2 * unit), (unit * 2.1, 3 * unit * 2.1)]
        roles = [
            RoleWork(name, count, *cost, reduce=0.3 * unit)
            for name, count, cost in zip(("critic", "actor"), counts, costs, strict=True)
        ]
        return make_schedule("flush_free", tuple(roles), 4).lists

    assert lists(factor) == lists(1.0)


@settings(max_examples=15)
@given(updates(most_chunks=4))
def test_interleaved_lists_keep_their_rules_and_get_no_slower(update):
    check_kinds(update)


@settings(max_examples=80)
@given(updates() | updates(most_chunks=3), st.data())
def test_an_update_left_at_any_step_ends_on_every_stage(update, data):
    stages, roles = update
    schedule = make_schedule(data.draw(st.sampled_from(KINDS)), roles, stages)
    steps = [action for action in schedule.lists[0] if action.kind == "step"]
    left = data.draw(st.sampled_from(steps))
    places = [actions.index(left) for actions in schedule.lists]
    lists = [
        [*actions[:place], *schedule.rest_after(stage, place)]
        for stage, (actions, place) in enumerate(zip(schedule.lists, places, strict=True))
    ]
    assert hang_of(lists, roles) is None
    taken = [[a for a in actions if a.kind == "step"] for actions in lists]
    assert all(steps_of_stage == steps[: steps.index(left)] for steps_of_stage in taken)


@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_forward_passes_of_several_roles_run_through_one_pipeline(stages, counts):
    # the roles have one, two, one, two, ... chunks
    roles = [
        RoleWork(f"role {i}", (count * stages,), chunks=1 + (i % 2 and stages > 1))
        for i, count in enumerate(counts)
    ]
    lists = [forward_list(roles, stage, stages) for stage in range(stages)]
    assert hang_of(lists, roles) is None
    passes = [[a for a in actions if a.kind == "forward"] for actions in lists]
    assert all(mine == passes[0] for mine in passes)
    assert len(set(passes[0])) == sum(r.micro_batches[0] * r.chunks for r in roles)


@settings(max_examples=40)
@given(st.integers(1, 16), st.integers(1, 20), st.integers(1, 4))
def test_sequential_idles_as_the_formula_says(stages, count, mini_batches):
    work = tuple(RoleWork(name, (count,) * mini_batches) for name in ("critic", "actor"))
    share = make_schedule("sequential", work, stages).simulation.idle_share
    assert share == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize(("stages", "groups", "chunks"), [(2, 1, 2), (4, 2, 2), (4, 1, 4)])
def test_interleaving_idles_as_the_formula_says(stages, groups, chunks):
    """Also Megatron's order of passes, by its own table."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    count = stages * groups
    work = RoleWork("actor", (count,), chunks=chunks)
    schedule = make_schedule("sequential", (work,), stages)
    idle = (stages - 1) / chunks
    assert schedule.simulation.idle_share == pytest.approx(idle / (count + idle))
    table = get_schedule_table(count, chunks, stages)
    for stage, actions in enumerate(schedule.lists):
        passes = {
            kind: [(a.micro_batch, a.chunk) for a in actions if a.kind == kind]
            for kind in ("forward", "backward")
        }
        assert passes["forward"] == table
        assert passes["backward"] == [(j, chunks - 1 - chunk) for j, chunk in table]
        kinds = [a.kind for a in actions if a.kind in passes]
        in_advance = 2 * (stages - stage - 1) + (chunks - 1) * stages
        assert kinds.index("backward") == min(in_advance + 1, count * chunks)


def test_interleaved_roles_share_a_pipeline_with_little_idle_time():
    """As many micro-batches as stages: the idle time left is that of one fill and drain."""
    work = tuple(RoleWork(name, (4,) * 4, chunks=2) for name in ("critic", "actor"))
    sequential, fused, free = (make_schedule(kind, work, 4).simulation for kind in KINDS)
    shares = [round(s.idle_share, 3) for s in (sequential, fused, free)]
    assert shares == [0.273, 0.158, 0.045]
    assert free.in_flight[0] <= sequential.in_flight[0]


def test_one_stage_never_idles():
    work = (RoleWork("critic", (3, 3)), RoleWork("actor", (5,), 2.0, 3.0))
    for kind in KINDS:
        assert make_schedule(kind, work, 1).simulation.idle_share == 0


def test_a_role_with_fewer_mini_batches_fills_the_pipeline_between_all_of_the_others():
    """One mini-batch of 16 beside four of 4: as full as four beside four."""
    many = RoleWork("actor", (4,) * 4)
    spread = make_schedule("flush_free", (RoleWork("critic", (16,)), many), 4).simulation
    equal = make_schedule("flush_free", (RoleWork("critic", (4,) * 4), many), 4).simulation
    assert spread.makespan == equal.makespan


def test_messages_are_received_directly_before_the_pass_that_needs_them():
    work = (RoleWork("critic", (2,)), RoleWork("actor", (2,)))
    second = make_schedule("flush_free", work, 2).lists[1]
    kinds = [(a.kind, a.role, a.micro_batch) for a in second[:6]]
    assert kinds == [
        ("receive_input", "critic", 0),
        ("forward", "critic", 0),
        ("backward", "critic", 0),
        ("send_gradient", "critic", 0),
        ("receive_input", "critic", 1),
        ("forward", "critic", 1),
    ]


@pytest.mark.parametrize("kind", ["forward", "send_output", "step"])
def test_a_list_without_one_of_its_actions_is_refused(kind):
    schedule = make_schedule("flush_free", (RoleWork("critic", (2, 2)), RoleWork("actor", (2,))), 2)
    first = [*schedule.lists[0]]
    first.remove(next(action for action in first if action.kind == kind))
    with pytest.raises(ScheduleFault, match=f"missing.*{kind}"):
        check_schedule(replace(schedule, lists=[first, schedule.lists[1]]))


def test_a_pass_before_its_message_is_refused():
    schedule = make_schedule("flush_free", (RoleWork("critic", (2,)), RoleWork("actor", (2,))), 2)
    first = [*schedule.lists[0]]
    early = Action("backward", "critic", 0, 0)
    first.remove(early)
    first.insert(first.index(Action("forward", "critic", 0, 0)), early)
    with pytest.raises(ScheduleFault, match="precedes the receive"):
        check_schedule(replace(schedule, lists=[first, schedule.lists[1]]))
