"""The chunks of a checkpoint's tensor against counting every number of it."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from mppo.weights.torch_dist.contents import Chunk, GlobalTensor, check_complete, needed_shape

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(shape: tuple[int, ...], boxes: list[Box]) -> GlobalTensor:
    chunks = (Chunk(offsets, sizes, Path("data"), 0, 0) for offsets, sizes in boxes)
    return GlobalTensor(shape, torch.float32, tuple(chunks))


def refusal(shape: tuple[int, ...], boxes: list[Box], needed: tuple[int, ...]) -> str:
    try:
        check_complete("weight", tensor(shape, boxes), needed)
    except ValueError as error:
        return str(error)
    return ""


def cut(shape: tuple[int, ...], random_: random.Random) -> list[Box]:
    """Cut a box into boxes at random, by halves that need not align."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(random_.randint(0, 6)):
        offsets, sizes = boxes.pop(random_.randrange(len(boxes)))
        dim = random_.randrange(len(shape))
        at = random_.randint(0, sizes[dim])
        rest = tuple(n + at * (i == dim) for i, n in enumerate(offsets))
        boxes.append((offsets, tuple(at if i == dim else n for i, n in enumerate(sizes))))
        boxes.append((rest, tuple(n - at * (i == dim) for i, n in enumerate(sizes))))
    random_.shuffle(boxes)
    return boxes


def counted(boxes: list[Box], needed: tuple[int, ...]) -> bool:
    """Whether each number of a part is in one box, by counting them all."""
    counts = np.zeros(needed, dtype=int)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())


@pytest.mark.parametrize("seed", range(60))
def test_the_check_agrees_with_counting_every_number(seed):
    random_ = random.Random(seed)
    for _ in range(20):
        shape = tuple(random_.randint(1, 5) for _ in range(random_.randint(1, 4)))
        needed = (random_.randint(1, shape[0]), *shape[1:])
        boxes = cut(shape, random_)
        assert refusal(shape, boxes, needed) == "", (shape, boxes)
        # a box moved, resized, lost or doubled, all inside the tensor
        number = random_.randrange(len(boxes))
        sizes = tuple(random_.randint(0, size) for size in shape)
        moved = tuple(random_.randint(0, a - b) for a, b in zip(shape, sizes, strict=True))
        changed = boxes[:number] + boxes[number + 1 :]
        changed += random_.choice(([], [(moved, sizes)], [boxes[number]] * 2))
        assert (refusal(shape, changed, needed) == "") == counted(changed, needed), changed


def test_an_overlap_that_has_the_size_of_a_hole_is_refused():
    boxes = [((0, 0), (3, 2)), ((1, 0), (3, 2))]
    assert refusal((6, 2), boxes, (6, 2)) == (
        "weight: its chunks overlap; copy the checkpoint again"
    )


@pytest.mark.parametrize(("boxes", "held"), [([], 0), ([((0, 0), (4, 2))], 8)])
def test_a_hole_is_counted(boxes, held):
    assert refusal((6, 2), boxes, (6, 2)).startswith(f"weight: its chunks hold {held} of the 12")


def test_a_number_and_a_huge_shape():
    assert refusal((), [((), ())], ()) == ""
    assert "hold 0 of the 1 numbers" in refusal((), [], ())
    assert "overlap" in refusal((), [((), ())] * 2, ())
    assert "too large" in refusal((1 << 40, 1 << 40), [], (1 << 40, 1 << 40))


def test_one_column_too_many_among_thousands_of_experts_is_refused():
    shape = (128, 64, 1 << 14, 1 << 14)
    half = 1 << 13
    boxes = [
        ((layer, expert, 0, column), (1, 1, 1 << 14, half))
        for layer, expert, column in product(range(128), range(64), (0, half))
    ]
    assert refusal(shape, boxes, shape) == ""
    boxes[7] = ((*boxes[7][0][:3], half - 1), boxes[7][1])
    assert "overlap" in refusal(shape, boxes, shape)


def test_the_vocabulary_may_be_stored_with_other_padding_but_not_short():
    assert needed_shape((304, 8), (320, 8), vocab=300) == (300, 8)
    assert needed_shape((300, 8), (320, 8), vocab=300) == (300, 8)
    assert needed_shape((260, 8), (320, 8), vocab=300) is None
    assert needed_shape((304, 4), (320, 8), vocab=300) is None
    assert needed_shape((), (320, 8), vocab=300) is None
    assert needed_shape((8, 8), (8, 8)) == (8, 8)
    assert needed_shape((9, 8), (8, 8)) is None
