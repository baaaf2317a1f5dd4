"""Distinct values of integer tensors, with the types that torch's annotations lack."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_unique = cast(Any, torch.unique)  # pyright: ignore[reportUnknownMemberType]  not annotated


def unique_index(x_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct values ``[G]`` in ascending order, each element's index among them, and counts.

    Returns:
        Values ``[G]``, int64 indices ``[N]``, int64 counts ``[G]``.
    """
    found = _unique(x_N, return_inverse=True, return_counts=True)
    return cast("tuple[Tensor, Tensor, Tensor]", found)
