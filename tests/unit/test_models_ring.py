"""Ring attention: blocks merged over the ranks equal attention on all keys."""

from __future__ import annotations

import pytest
import torch

from mppo.models.attention.block import BlockAttention
from mppo.models.attention.context import ContextPlace, split_context
from mppo.models.attention.ring import _Ring, chunk_pairs, merge_attention

HEADS, GROUPS, KEY_WIDTH, VALUE_WIDTH = 4, 2, 6, 5
SHAPES = {
    "plain": BlockAttention(),
    "scaled": BlockAttention(scale=0.7),
    "window": BlockAttention(window=3),
    "wide window": BlockAttention(window=170),
    "softcap": BlockAttention(softcap=0.5),
    "softcap and window": BlockAttention(softcap=0.5, window=150),
}


def attention(q, k, v, block: BlockAttention):
    """Output ``[T, heads, value_dim]`` and log-sum-exp ``[heads, T]`` of one complete sequence."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (block.scale or KEY_WIDTH**-0.5)
    if block.softcap is not None:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    before = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (before < 0) | (before >= (block.window or len(q)))
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)


def random_qkv(tokens: int):
    torch.manual_seed(tokens)
    shapes = [(HEADS, KEY_WIDTH), (GROUPS, KEY_WIDTH), (GROUPS, VALUE_WIDTH)]
    return [torch.randn(tokens, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_all_ranks_add_up_to_attention(name, size):
    """Two sequences of one padded length share rows, a third is longer than a tile of queries."""
    block, lengths = SHAPES[name], [37, 600, 33]
    qkv = random_qkv(sum(lengths))
    parts = zip(*(x.split(lengths) for x in qkv), strict=True)
    out = torch.cat([attention(*part, block)[0] for part in parts])
    upstream = torch.randn_like(out)
    out.backward(upstream)
    splits = [split_context(lengths, ContextPlace(size, rank), 1) for rank in range(size)]
    rings = [_Ring(split, block, None) for split in splits]

    def local(x, rank):
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[splits[rank].origin_t].detach()

    held = [[local(x, rank) for x in qkv] for rank in range(size)]
    grads = [[torch.zeros_like(x) for x in mine] for mine in held]
    for rank, ring in enumerate(rings):
        sums, real = {}, splits[rank].origin_t >= 0
        order = [source for source, _ in ring._sources()]
        for source in order:
            ring._attend(held[rank][0], *held[source][1:], source, sums)
        strips = [sums[key] for key in sorted(sums)]
        found = torch.cat([x.flatten(0, 1) for x, _ in strips])
        torch.testing.assert_close(found[real], local(out, rank)[real], rtol=1e-12, atol=1e-12)
        lse, grad = [x for _, x in strips], local(upstream, rank)
        for source in order:
            more = ring._gradients(
                grad, held[rank][0], *held[source][1:], found, lse, source, grads[rank][0]
            )
            for x, y in zip(grads[source][1:], more, strict=True):
                x += y
    for rank, mine in enumerate(grads):
        real = splits[rank].origin_t >= 0
        for x, complete in zip(mine, qkv, strict=True):
            expected = local(complete.grad, rank)
            torch.testing.assert_close(x[real], expected[real], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_merged_halves_are_attention_on_both(cut):
    """Attention of the last query on keys before and after a cut, against all keys at once."""
    q, k, v = (x.detach()[None] for x in random_qkv(20))
    last, block = q[:, -1:], BlockAttention()
    out, lse = block.forward(last, k[:, :cut], v[:, :cut], offset=19)
    more, more_lse = block.forward(last, k[:, cut:], v[:, cut:], offset=19 - cut)
    out, lse = merge_attention(out, lse, more, more_lse)
    expected, wanted_lse = attention(q[0], k[0], v[0], block)
    torch.testing.assert_close(out[0, 0], expected[-1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse[0, :, 0], wanted_lse[:, -1], rtol=1e-13, atol=1e-13)


def test_a_block_outside_the_mask_changes_nothing():
    """Its output is 0 and its log-sum-exp -inf; merging gives the other block's values."""
    q, k, v = (x.detach()[None] for x in random_qkv(20))
    block = BlockAttention(window=2)
    out, lse = block.forward(q, k, v, offset=40)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())
    near = block.forward(q, k, v, offset=0)
    for found, expected in zip(merge_attention(*near, out, lse), near, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_chunk_attends_once_to_all_before_it_and_work_is_even(size):
    places = [ContextPlace(size, rank) for rank in range(size)]
    seen = []
    for place in places:
        for other in places:
            pairs = chunk_pairs(place, other.rank)
            assert len(pairs) == (3 if other == place else 2)
            for mine, theirs, chunks in pairs:
                assert place.chunks[mine] - other.chunks[theirs] == chunks
                seen.append((place.chunks[mine], other.chunks[theirs]))
    assert sorted(seen) == [(i, j) for i in range(2 * size) for j in range(i + 1)]
