"""Stages that execute lists under the rules of streams and communicators."""

from __future__ import annotations

import random

import pytest

from mppo.pipeline import schedule_checks
from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.deadlock import Rules, find_hang
from mppo.pipeline.schedule import forward_list, make_schedule
from mppo.pipeline.schedule_checks import checked_schedule
from mppo.pipeline.stage_events import events_of, hang_of

MANY_QUEUES = Rules(queues=32)
SHAPES = [(2, (2, 2), 1.0), (2, (4,), 0.5), (3, (2, 3), 3.1), (4, (4, 4), 1.0), (4, (3,), 6.2)]


def works(counts: tuple[int, ...], cost: float, chunks: int = 1, stages: int = 1):
    counts = tuple(stages for _ in counts) if chunks > 1 else counts
    critic = RoleWork("critic", counts, cost, 2 * cost, chunks=chunks)
    return critic, RoleWork("actor", counts, chunks=chunks)


def a_pass_earlier(actions: list[Action]) -> list[Action]:
    """The receives of a list, posted before the pass that precedes the one that needs them."""
    result, place = [], 0
    for action in actions:
        if action.kind.startswith("receive"):
            result.insert(place, action)
            continue
        if action.kind in ("forward", "backward"):
            place = len(result)
        result.append(action)
        if action.kind == "step":
            place = len(result)
    return result


@pytest.mark.parametrize(("stages", "counts", "cost"), SHAPES)
def test_receives_posted_a_pass_early_hang_at_a_wait_for_the_device(stages, counts, cost):
    roles = works(counts, cost)
    lists = make_schedule("flush_free", roles, stages).lists
    assert hang_of(lists, roles, "device") is None
    early = [a_pass_earlier(actions) for actions in lists]
    assert hang_of(early, roles, "device") is not None


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", ["fused", "flush_free"])
def test_interleaved_messages_that_share_a_group_are_refused(kind, stages):
    """NCCL pairs them by their order, and executes them one after the other."""
    roles = works((1, 1), 1.0, chunks=2, stages=stages)
    lists = make_schedule(kind, roles, stages).lists
    apart = events_of(lists, roles)
    assert find_hang(apart, MANY_QUEUES) is None
    extra = ("pp_back", "pp_wrap", "pp_wrap_back")
    shared = [
        [event._replace(group="one" if event.group in extra else event.group) for event in events]
        for events in apart
    ]
    assert find_hang(shared, MANY_QUEUES) is not None


def test_some_interleaved_lists_hang_with_one_hardware_queue():
    draw, hanging = random.Random(0), 0
    for _ in range(12):
        counts = tuple(4 * draw.randint(1, 2) for _ in range(3))
        roles = tuple(RoleWork(name, counts, chunks=2) for name in ("critic", "actor"))
        events = events_of(make_schedule("flush_free", roles, 4).lists, roles)
        assert find_hang(events, MANY_QUEUES) is None
        hanging += find_hang(events, Rules(queues=1)) is not None
    assert hanging


@pytest.mark.parametrize(("stages", "counts", "cost"), SHAPES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_update_left_at_any_step_does_not_hang(stages, counts, cost, chunks):
    roles = works(counts, cost, chunks, stages)
    schedule = make_schedule("flush_free", roles, stages)
    for left in [action for action in schedule.lists[0] if action.kind == "step"]:
        lists = []
        for stage, actions in enumerate(schedule.lists):
            place = actions.index(left)
            lists.append([*actions[: place + 1], *schedule.rest_after(stage, place)])
        assert hang_of(lists, roles) is None


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_forward_passes_do_not_hang(stages, chunks):
    roles = [RoleWork(name, (2 * stages,), chunks=chunks) for name in ("ref", "actor")]
    lists = [forward_list(roles, stage, stages) for stage in range(stages)]
    assert hang_of(lists, roles) is None


def test_an_invalid_schedule_is_replaced_by_the_sequential_one(monkeypatch):
    """Whatever is wrong with it; and an invalid sequential one is an error."""
    spoiled = {"flush_free"}

    def make_spoiled(kind, roles, stages):
        schedule = make_schedule.__wrapped__(kind, roles, stages)
        if kind in spoiled:
            schedule.lists[0].remove(Action("step", "actor", 0))
        return schedule

    monkeypatch.setattr(schedule_checks, "make_schedule", make_spoiled)
    roles = works((2, 2), 3.1)
    schedule, fault = checked_schedule.__wrapped__("flush_free", roles, 2)
    assert (schedule.kind, schedule.lists) == (
        "sequential",
        make_schedule("sequential", roles, 2).lists,
    )
    assert fault is not None
    assert "missing" in fault
    spoiled.add("sequential")
    checked_schedule.cache_clear()
    with pytest.raises(schedule_checks.ScheduleFault, match="missing"):
        checked_schedule.__wrapped__("flush_free", roles, 2)
