"""Micro-batch plans keep their invariants for any lengths and limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.microbatches import MicroBatchLimits, MicroBatchSpec, plan_microbatches
from mppo.parallel.partition import partition
from mppo.trainer.metrics import balance_metrics

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 9), st.integers(1, 4))
def test_plan_by_count(lengths, dp, max_sequences, multiple):
    plan = plan_microbatches(
        lengths, range(len(lengths)), dp, MicroBatchLimits(max_sequences), multiple
    )
    check_plan(plan, lengths, dp, multiple)
    assert all(len(part) <= max_sequences for rank in plan for part in rank)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 80), st.integers(1, 4))
def test_plan_by_token_budget(lengths, dp, max_tokens, multiple):
    limits = MicroBatchLimits(1, max_tokens)
    plan = plan_microbatches(lengths, range(len(lengths)), dp, limits, multiple)
    check_plan(plan, lengths, dp, multiple)
    for rank in plan:
        for part in rank:
            assert len(part) <= 1 or sum(lengths[i] for i in part) <= max_tokens


def check_plan(plan, lengths, dp, multiple):
    """Check that every sequence occurs once, in equally many micro-batches on every rank."""
    assert len(plan) == dp
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0


@given(LENGTHS, st.integers(1, 6))
def test_partition_is_balanced(weights, parts):
    loads = [sum(weights[i] for i in part) for part in partition(weights, parts)]
    assert max(loads) - min(loads) <= max(weights)


def test_partition_with_equal_counts():
    parts = partition([9, 1, 1, 1, 1, 1], 2, equal_count=True)
    assert sorted(len(part) for part in parts) == [3, 3]
    parts = partition([9, 1, 1, 1, 1, 1, 1], 3, equal_count=True)
    assert sorted(len(part) for part in parts) == [2, 2, 3]


@given(LENGTHS, st.integers(1, 8))
def test_equal_counts_differ_by_one_at_most_and_parts_are_complete(weights, parts):
    divided = partition(weights, parts, equal_count=True)
    assert sorted(i for part in divided for i in part) == list(range(len(weights)))
    assert max(map(len, divided)) - min(map(len, divided)) <= 1


def test_a_plan_for_part_of_the_batch_contains_only_that_part():
    plan = plan_microbatches([5, 6, 7, 8], [3, 1], 2, MicroBatchLimits(4))
    assert sorted(i for rank in plan for part in rank for i in part) == [1, 3]


def test_a_sequence_over_the_budget_is_alone():
    plan = plan_microbatches([3, 50, 4], range(3), 1, MicroBatchLimits(1, 10))
    assert sorted(map(sorted, plan[0])) == [[0, 2], [1]]


def test_a_role_cuts_every_rank_into_a_multiple_of_its_micro_batches():
    spec = MicroBatchSpec(1, 2, MicroBatchLimits(1))
    assert [len(spec.plan([4] * 5, part)[0]) for part in ([0, 1, 2], [3, 4])] == [4, 2]
    assert len(MicroBatchSpec(2, 1, MicroBatchLimits(2)).plan([4] * 5)) == 2


def test_balance_metrics_by_hand():
    metrics = balance_metrics([5, 1, 4, 2], 2)
    assert metrics == {
        "global_seqlen/min": 6.0,
        "global_seqlen/max": 6.0,
        "global_seqlen/minmax_diff": 0.0,
        "global_seqlen/balanced_min": 6.0,
        "global_seqlen/balanced_max": 6.0,
        "global_seqlen/mean": 6.0,
    }
    uneven = balance_metrics([5, 4, 1, 2], 2)
    assert uneven["global_seqlen/minmax_diff"] == 6.0
    assert uneven["global_seqlen/balanced_max"] == 6.0
