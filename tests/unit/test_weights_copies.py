"""Folding copies changes their number, and never which bytes arrive where."""

from __future__ import annotations

import random

import torch

from mppo.weights.blocks import ZERO, shard_blocks
from mppo.weights.bucket import BucketLayout, nbytes_of
from mppo.weights.copies import BufferCopy, Slice, copy_tensors, folded, slice_copy


def bytes_of(count: int) -> torch.Tensor:
    return torch.randint(1, 256, (count,), dtype=torch.uint8, generator=torch.manual_seed(count))


def run(copies: list[BufferCopy], source: torch.Tensor, nbytes: int) -> torch.Tensor:
    target = torch.zeros(nbytes, dtype=torch.uint8)
    for copy in copies:
        copy.run(source, target)
    return target


def shard_copies(layers: int, ranks: int) -> tuple[list[BufferCopy], int, int]:
    """Copies that put together the tensors of some layers from shards of ``ranks`` ranks."""
    kinds = [
        ("qkv", 0, [(64, 24), (16, 24), (16, 24)], 8),
        ("copy", 1, [(24, 64)], 1),
        ("gated", 0, [(48, 24), (48, 24)], 1),
        ("vocab", 0, [(61, 24)], 1),
    ]
    hf = BucketLayout.plan(
        (f"{layer}.{kind}.{number}", torch.bfloat16, shape)
        for layer in range(layers)
        for kind, _, shapes, _ in kinds
        for number, shape in enumerate(shapes)
    )
    places = {place.name: place for place in hf.places}
    copies, at = [], 0
    for rank in range(ranks):
        for layer in range(layers):
            for kind, dim, shapes, groups in kinds:
                lengths = tuple(shape[dim] for shape in shapes)
                total = 64 if kind == "vocab" else sum(lengths)
                shard = list(shapes[0])
                shard[dim] = total // ranks
                offset = 0
                for block in shard_blocks(kind, lengths, rank, ranks, groups, padded=64):
                    if block.source != ZERO:
                        place = places[f"{layer}.{kind}.{block.source}"]
                        source = Slice(at, tuple(shard), offset)
                        target = Slice(place.start, place.shape, block.start)
                        copies.append(slice_copy(source, target, dim, block.length, 2))
                    offset += block.length
                at += nbytes_of(shard, torch.bfloat16)
    return copies, at, hf.nbytes


def test_the_shards_of_all_ranks_and_layers_are_put_together_by_one_copy_per_tensor() -> None:
    copies, source_bytes, target_bytes = shard_copies(layers=5, ranks=4)
    source, few = bytes_of(source_bytes), folded(copies)
    assert torch.equal(run(few, source, target_bytes), run(copies, source, target_bytes))
    # seven tensors a layer; keys and values take one copy, so do gate and up, and the shorter last
    # shard of the vocabulary takes one of its own
    assert len(copies) == 200
    assert len(few) == 6


def test_any_set_of_copies_is_folded_without_changing_its_result() -> None:
    choice = random.Random(3)
    for _ in range(300):
        copies, at = [], 0
        length = choice.choice((1, 2, 3, 8, 16))
        for _ in range(choice.randint(1, 40)):
            at += choice.choice((0, 0, length, 5))
            size = choice.choice((length, length, length, 7))
            source = choice.choice((at, 3 * at % 900, choice.randrange(900)))
            copies.append(BufferCopy(source, at, (size,)))
            at += size
        choice.shuffle(copies)
        source, few = bytes_of(1024), folded(copies)
        assert len(few) <= len(copies)
        assert torch.equal(run(few, source, 2048), run(copies, source, 2048))


def test_tensors_are_copied_whatever_their_strides_and_dtypes() -> None:
    plain = torch.randn(3, 4)
    sources = [plain, plain.t(), torch.randn(5).bfloat16(), plain[:, 1:3]]
    for dtype in (torch.float32, torch.bfloat16):
        targets = [torch.empty(source.shape, dtype=dtype) for source in sources]
        copy_tensors(zip(targets, sources, strict=True))
        assert all(torch.equal(t, s.to(dtype)) for t, s in zip(targets, sources, strict=True))
