"""Splitting sequences over context-parallel ranks: every token once, evenly, in order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.models.attention.context import ContextPlace, sequence_order, split_context

EXAMPLES = settings(max_examples=50)
LENGTHS = st.lists(st.integers(0, 40), max_size=8)


def _splits(lengths, size, multiple, merge=True):
    return [split_context(lengths, ContextPlace(size, r), multiple, merge) for r in range(size)]


@EXAMPLES
@given(lengths=LENGTHS, size=st.integers(2, 4), multiple=st.integers(1, 6))
def test_every_token_is_on_one_rank_and_ranks_have_equally_many(lengths, size, multiple) -> None:
    splits = _splits(lengths, size, multiple)
    origin = torch.cat([split.origin_t for split in splits])
    assert sorted(origin[origin >= 0].tolist()) == list(range(sum(lengths)))
    counts = {len(split.origin_t) for split in splits}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0
    assert all(split.cu_seqlens[-1] == size * len(split.origin_t) for split in splits)


@EXAMPLES
@given(lengths=LENGTHS, size=st.integers(2, 4))
def test_padding_is_less_than_2n_tokens_per_sequence(lengths, size) -> None:
    split = split_context(lengths, ContextPlace(size, 0), 1)
    padding = size * len(split.origin_t) - sum(lengths)
    assert padding <= max(1, sum(length > 0 for length in lengths)) * 2 * size


@EXAMPLES
@given(lengths=LENGTHS.filter(any), size=st.integers(2, 4), merge=st.booleans())
def test_gathered_tokens_come_back_in_sequence_order(lengths, size, merge) -> None:
    splits = _splits(lengths, size, 2, merge)
    gathered = torch.cat([split.origin_t for split in splits])[:, None]
    positions = torch.cat([split.positions_t for split in splits])[:, None]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    seen = []
    for rows in splits[0].rows:
        order = sequence_order(gathered, rows, splits[0].place)[..., 0]
        place = sequence_order(positions, rows, splits[0].place)[..., 0]
        assert torch.equal(place, torch.arange(place.shape[1]).expand_as(place))
        for sequence in order:
            real = sequence[sequence >= 0]
            if len(real):
                assert real.tolist() == list(range(int(real[0]), int(real[0]) + len(real)))
                assert int(real[0]) in starts.tolist()
                seen += real.tolist()
    assert sorted(seen) == list(range(sum(lengths)))


def test_causal_work_is_even_over_ranks() -> None:
    size, length = 4, 4096
    pairs = []
    for split in _splits([length], size, 1):
        pairs.append(int((split.positions_t + 1).sum()))
    assert max(pairs) == min(pairs)
    assert sum(pairs) == length * (length + 1) // 2


def test_without_merging_sequences_keep_their_order() -> None:
    split = split_context([8, 16, 8], ContextPlace(2, 1), 1, merge=False)
    assert split.cu_seqlens.tolist() == [0, 8, 24, 32]
    assert split.origin_t.tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19, 26, 27, 28, 29]
