"""Blocks: the shards are a partition of the tensors, for all sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.weights.blocks import ZERO, Block, padded_vocab_size, shard_blocks

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def assemble(kind, tensors, rank, size, groups=1, padded=0):
    lengths = tuple(len(t) for t in tensors)
    parts = [
        torch.zeros(b.length) if b.source == ZERO else tensors[b.source][b.start :][: b.length]
        for b in shard_blocks(kind, lengths, rank, size, groups, padded)
    ]
    return torch.cat(parts)


@settings(max_examples=60)
@given(groups=st.integers(1, 8), queries=st.integers(1, 6), width=st.integers(1, 5), data=st.data())
def test_qkv_shards_are_chunks_of_the_interleaved_tensor(groups, queries, width, data):
    rows = groups * (queries + 2) * width
    size = data.draw(st.sampled_from([s for s in (1, 2, 3, 4, 8) if rows % s == 0]))
    q, k, v = (
        base + torch.arange(groups * n * width).float()
        for base, n in ((0, queries), (1e4, 1), (2e4, 1))
    )
    complete = torch.cat([x.view(groups, -1) for x in (q, k, v)], 1).flatten()
    shards = [assemble("qkv", (q, k, v), rank, size, groups) for rank in range(size)]
    assert torch.equal(torch.cat(shards), complete)


@settings(max_examples=40)
@given(part=st.integers(1, 9), size=SIZES)
def test_gated_shards_stack_a_slice_of_each_source(part, size):
    gate, up = torch.arange(part * size).float(), 1e3 + torch.arange(part * size).float()
    for rank in range(size):
        expected = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        assert torch.equal(assemble("gated", (gate, up), rank, size), expected)


@settings(max_examples=40)
@given(vocab=st.integers(1, 200), size=SIZES)
def test_vocab_shards_make_up_the_padded_vocabulary(vocab, size):
    rows, padded = torch.arange(1, vocab + 1).float(), padded_vocab_size(vocab, size)
    shards = [assemble("vocab", (rows,), rank, size, padded=padded) for rank in range(size)]
    assert len({len(shard) for shard in shards}) == 1
    assert torch.equal(torch.cat(shards)[:vocab], rows)
    assert not torch.cat(shards)[vocab:].any()


def test_blocks_of_two_key_value_heads_on_four_ranks():
    shards = [shard_blocks("qkv", (8, 4, 4), rank, 4, 2) for rank in range(4)]
    assert shards[0] == (Block(0, 0, 4),)
    assert shards[1] == (Block(1, 0, 2), Block(2, 0, 2))
    assert shards[2] == (Block(0, 4, 4),)


@pytest.mark.parametrize(
    ("kind", "lengths", "size"), [("copy", (7,), 2), ("gated", (6, 7), 2), ("qkv", (6, 3, 3), 5)]
)
def test_lengths_that_do_not_divide_are_refused(kind, lengths, size):
    with pytest.raises(ValueError, match="cannot be cut"):
        shard_blocks(kind, lengths, 0, size, 3)
