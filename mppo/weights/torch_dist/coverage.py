"""Whether the chunks of a checkpoint's tensor fill every number of it that a model needs."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from mppo.safety.input_error import InputError
from mppo.weights.torch_dist.contents import GlobalTensor

MOST_CORNERS = 1 << 62
"""Most positions in a tensor, so that each is one 64-bit integer."""


def needed_shape(
    stored: tuple[int, ...], shape: tuple[int, ...], vocab: int | None = None
) -> tuple[int, ...] | None:
    """Return the shape of the part of a stored tensor that a model needs, from the first number on;
    None if it is too short, or of another shape. ``vocab`` are the rows without padding, for
    embeddings and output layers, which may be stored with another padding."""
    if vocab is None:
        return shape if stored == shape else None
    fits = len(stored) > 0 and stored[0] >= vocab and stored[1:] == shape[1:]
    return (vocab, *shape[1:]) if fits else None


def check_complete(name: str, tensor: GlobalTensor, needed: tuple[int, ...]) -> None:
    """Check that every number of a part of a tensor, from the first on, is in exactly one chunk,
    else InputError. The number of chunks over a point is a function of the point. It is 1 inside
    the part and 0 outside exactly if its mixed differences, which are the chunks' corners with
    alternating signs, are those of the part. So the cost is linear in the number of chunks."""
    total = math.prod(needed)
    if math.prod(size + 1 for size in needed) > MOST_CORNERS:
        raise InputError(f"{name}: a shape of {list(needed)} is too large")
    last = np.array(needed, dtype=np.int64)
    begin = _rows([chunk.offsets for chunk in tensor.chunks], last)
    end = np.minimum(begin + _rows([chunk.sizes for chunk in tensor.chunks], last), last)
    begin = np.minimum(begin, last)
    filled = int((end - begin).prod(axis=1).sum())
    if filled < total:
        raise InputError(
            f"{name}: its chunks hold {filled} of the {total} numbers that the model needs; copy "
            "the checkpoint again"
        )
    if filled > total or not _tile(begin, end, last):
        raise InputError(f"{name}: its chunks overlap; copy the checkpoint again")


def _rows(values: list[tuple[int, ...]], last: np.ndarray) -> np.ndarray:
    return np.array(values, dtype=np.int64).reshape(len(values), len(last))


def _tile(begin: np.ndarray, end: np.ndarray, last: np.ndarray) -> bool:
    """Return whether boxes ``[begin, end)`` fill ``[0, last)`` once; int64 ``[N, D]``, ``[D]``."""
    cut = ((begin != 0) | (end != last)).any(axis=0)  # other axes have no influence
    if not cut.any():
        return len(begin) == 1
    weights = np.ones(len(begin) + 1, dtype=np.int64)
    weights[-1] = -1  # the box that must be filled
    lower = np.vstack([begin, np.zeros_like(last)])[:, cut].T
    upper = np.vstack([end, last])[:, cut].T
    corners, signs = [], []
    for choice in product((False, True), repeat=len(lower)):
        corner = [high if up else low for up, low, high in zip(choice, lower, upper, strict=True)]
        corners.append(np.ravel_multi_index(corner, last[cut] + 1))
        signs.append(weights * (-1) ** sum(choice))
    _, numbers = np.unique(np.concatenate(corners), return_inverse=True)
    return not np.bincount(numbers, weights=np.concatenate(signs)).any()
