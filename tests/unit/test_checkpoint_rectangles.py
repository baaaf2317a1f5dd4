"""Flat ranges as rectangles."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.checkpoint.rectangles import Rectangle, rectangles


def test_a_range_over_three_rows():
    assert rectangles((4, 5), 3, 17) == [
        Rectangle((0, 3), (1, 2), 3),
        Rectangle((1, 0), (2, 5), 5),
        Rectangle((3, 0), (1, 2), 15),
    ]


def test_a_range_inside_one_row_and_an_empty_one():
    assert rectangles((4, 5), 6, 8) == [Rectangle((1, 1), (1, 2), 6)]
    assert rectangles((4, 5), 6, 6) == []


@given(st.data())
def test_they_cover_the_range_exactly_once_and_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    flat = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    found = rectangles(shape, start, stop)
    assert len(found) <= 2 * len(shape) - 1
    covered = []
    for block in found:
        view = flat.view(shape)
        for dim, (offset, size) in enumerate(zip(block.offset, block.shape)):
            view = view.narrow(dim, offset, size)
        assert torch.equal(view.flatten(), flat[block.start : block.start + block.size])
        covered += view.flatten().tolist()
    assert covered == list(range(start, stop))
