"""Resharding plans, executed on real tensors, give the engine exactly its slices."""

from __future__ import annotations

import math
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import MLAShape, ModelShape
from mppo.weights.blocks import ZERO, padded_vocab_size
from mppo.weights.slices.reshard import ReshardPlanner, engine_blocks, engine_tensor
from mppo.weights.stream import plan_units
from mppo.weights.table import Entry, parameter_table


def model(
    kv_heads=2, per_group=2, vocab=37, experts=0, latent=False, sparse=(False, True)
) -> ModelShape:
    heads = kv_heads * per_group
    experts = experts if any(sparse) else 0
    return ModelShape(
        model_type="deepseek_v3" if latent else "qwen2_moe" if experts else "qwen2",
        num_layers=len(sparse), hidden=12, heads=heads, kv_heads=heads if latent else kv_heads,
        head_dim=4, ffn=16, vocab=vocab, tied=False, qkv_bias=not latent,
        sparse_layers=tuple(layer and bool(experts) for layer in sparse), num_experts=experts,
        expert_ffn=8 if experts else 0,
        shared_ffn=8 if experts else 0, shared_gate=bool(experts) and not latent,
        mla=MLAShape(8, 8, 4, 4, 4) if latent else None,
    )  # fmt: skip


def owners(layout: Layout, shape: ModelShape, first: int = 1) -> dict:
    """The stage of each layer and end, with ``first`` layers in the first of two stages."""
    ends = {"embedding.word_embeddings.weight": 0}
    last = layout.pp - 1
    ends |= {"decoder.final_layernorm.weight": last, "output_layer.weight": last}
    return ends | {i: 0 if layout.pp == 1 or i < first else 1 for i in range(shape.num_layers)}


def assembled(blocks, tensors, dim) -> torch.Tensor:
    parts = []
    for block in blocks:
        like = tensors[0].narrow(dim, 0, 0)
        empty = torch.zeros([block.length if i == dim else n for i, n in enumerate(like.shape)])
        parts.append(
            empty if block.source == ZERO
            else tensors[block.source].narrow(dim, block.start, block.length)
        )  # fmt: skip
    return torch.cat(parts, dim)


def training_shard(entry: Entry, shape: ModelShape, layout: Layout, rank: int, tensors, owner):
    """The slice of an entry on a training rank; None if the rank has none."""
    here = layout.coordinates(rank)
    if here.pp != owner[entry.row.name if entry.layer is None else entry.layer]:
        return None
    if entry.expert is not None and entry.expert * layout.ep // shape.num_experts != here.ep:
        return None
    expert = entry.row.group == "etp"
    index, size = (here.etp, layout.etp) if expert else (here.tp, layout.tp)
    padded = padded_vocab_size(shape.vocab, size) if entry.row.kind == "vocab" else 0
    blocks = entry.blocks(index, size, shape.kv_heads, padded)
    return assembled(blocks, tensors, entry.cut_dim)


def check(
    shape: ModelShape,
    layout: Layout,
    engines: list[list[int]],
    first: int = 1,
    expert_parallel: int = 1,
) -> tuple[int, int]:
    """Carry a plan out; returns elements crossing ranks and elements in all.

    Every element has a number of its own, so it is also seen which of them a host does not hold
    itself: no plan brings it fewer from other ranks.
    """
    crossing = total = 0
    owner = owners(layout, shape, first)
    planner = ReshardPlanner(shape, layout, owner, engines, 8, expert_parallel=expert_parallel)
    for entry in parameter_table(shape).entries():
        plan, dim = planner.plan(entry), entry.cut_dim
        sizes = [math.prod(part) for part in entry.row.shapes]
        numbers = torch.arange(1.0, sum(sizes) + 1).split(sizes)
        tensors = [n.view(part) for n, part in zip(numbers, entry.row.shapes, strict=True)]
        least = everything = 0
        for engine in engines:
            for index, host in enumerate(engine):
                blocks = engine_blocks(entry, shape, index, len(engine), 8, expert_parallel)
                if not blocks:
                    assert all(move.destination != host for move in plan.moves)
                    continue
                expected = assembled(blocks, tensors, dim)
                got = torch.zeros_like(expected)
                for move in plan.moves:
                    if move.destination == host:
                        shard = training_shard(entry, shape, layout, move.source, tensors, owner)
                        part = shard.narrow(dim, move.source_offset, move.length)
                        got.narrow(dim, move.destination_offset, move.length).copy_(part)
                assert torch.equal(got, expected), entry.name
                held = training_shard(entry, shape, layout, host, tensors, owner)
                needed = expected[expected > 0]
                everything += len(needed)
                least += len(needed) if held is None else int((~torch.isin(needed, held)).sum())
        assert (plan.crossing, plan.total) == (least, everything), entry.name
        crossing, total = crossing + plan.crossing, total + plan.total
    return crossing, total


@settings(max_examples=20)
@given(
    train=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]),
    rollout=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]),
    kv_heads=st.sampled_from([1, 2, 4]), vocab=st.integers(5, 70),
    experts=st.sampled_from([0, 2, 6]), latent=st.booleans(),
    sparse=st.lists(st.booleans(), min_size=2, max_size=3), first=st.integers(1, 2),
)  # fmt: skip
def test_any_layout_reaches_any_engine_with_the_least_that_must_cross(
    train, rollout, kv_heads, vocab, experts, latent, sparse, first
):
    tp, pp = train
    layout = Layout(world=4, tp=tp, pp=pp, ep=2 if experts else 1, etp=1)
    if not latent and tp > kv_heads and tp % kv_heads:
        return
    shape = model(kv_heads, 4, vocab, experts, latent, sparse)
    ranks, groups = rollout
    engines = [list(range(begin, begin + ranks)) for begin in range(0, 4, ranks)]
    crossing, total = check(shape, layout, engines, min(first, len(sparse) - 1), groups)
    assert 0 <= crossing <= total


def test_gated_and_row_cuts_of_equal_size_move_nothing():
    shape, layout = model(), Layout(world=2, tp=2)
    planner = ReshardPlanner(shape, layout, owners(layout, shape), [[0, 1]], 1)
    for plan in map(planner.plan, parameter_table(shape).entries()):
        if ".mlp.linear_fc" in plan.entry.name:
            assert plan.crossing == 0


def test_keys_and_values_are_repeated_for_more_ranks_than_heads():
    shape = model(kv_heads=2, per_group=4)
    entry = next(e for e in parameter_table(shape).entries() if "linear_qkv.weight" in e.name)
    blocks = [engine_blocks(entry, shape, rank, 4) for rank in range(4)]
    assert blocks[0][1] == blocks[1][1]
    assert blocks[2][1].start == 4
    assert sum(b[0].length for b in blocks) == 32


def test_groups_of_an_engine_hold_their_own_experts_and_nothing_of_the_others() -> None:
    shape = model(experts=6)
    experts = [e for e in parameter_table(shape).entries() if e.expert is not None]
    held: list[set[int]] = [set() for _ in range(4)]
    for rank, entry in product(range(4), experts):
        blocks = engine_blocks(entry, shape, rank, 4, expert_parallel=2)
        if blocks:
            held[rank].add(entry.expert)
            assert blocks == engine_blocks(entry, shape, rank % 2, 2)
            place = engine_tensor(entry, shape, rank, 4, expert_parallel=2)
            assert (place.expert, place.shape[0]) == (entry.expert % 3, 3)
    assert held == [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {3, 4, 5}]


def test_experts_shared_out_alike_on_both_sides_do_not_cross() -> None:
    shape, layout = model(experts=6), Layout(world=2, tp=2, ep=2, etp=1)
    for groups, crosses in ((2, False), (1, True)):
        planner = ReshardPlanner(
            shape, layout, owners(layout, shape), [[0, 1]], expert_parallel=groups
        )
        experts = [e for e in parameter_table(shape).entries() if e.expert is not None]
        of_experts = [planner.plan(entry).crossing for entry in experts]
        assert len(of_experts) == 12
        assert all(bool(crossing) == crosses for crossing in of_experts)


def test_what_an_engine_fuses_travels_together() -> None:
    alone = Layout(1)
    for latent, fused in (
        (True, {"q_a_proj", "kv_a_proj_with_mqa"}),
        (False, {"q_proj", "k_proj", "v_proj"}),
    ):
        shape = model(latent=latent, experts=4)
        units = [
            {name.split(".")[-2] for entry in unit.entries for name in entry.hf}
            for unit in plan_units(parameter_table(shape), alone, owners(alone, shape))
        ]
        assert [unit for unit in units if unit & fused] == [fused] * shape.num_layers
