"""Tensors in one buffer, with the layout that says where each of them is.

The layout of a bucket is computed once, where the bucket is made. The shared memory, the table for
a server and the server's loader use that same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mppo.weights.copies import copy_tensors

ALIGNMENT = 16
"""Bytes; a tensor of any dtype can be viewed at a multiple of it."""

NamedTensors = Iterable[tuple[str, Tensor]]
"""Hugging Face names and whole tensors; a ``WeightBucket`` is one."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a bucket, from its byte ``start``, under its Hugging Face name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + nbytes_of(self.shape, self.dtype)

    @property
    def dtype_name(self) -> str:
        """Torch's short name of the dtype, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def view(self, content: Tensor) -> Tensor:
        """The tensor as a view of the bucket's bytes (uint8)."""
        return content[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    places: tuple[TensorPlace, ...]
    nbytes: int

    @classmethod
    def plan(
        cls, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], alignment: int = ALIGNMENT
    ) -> BucketLayout:
        """Lay tensors, given by name, dtype and shape, out one after the other, each at a multiple
        of ``alignment`` bytes."""
        places, offset = [], 0
        for name, dtype, shape in tensors:
            places.append(TensorPlace(name, dtype, tuple(shape), offset))
            offset = aligned(places[-1].end, alignment)
        return cls(tuple(places), offset)

    def to_json(self) -> dict[str, Any]:
        rows = [(p.name, p.dtype_name, p.shape, p.start) for p in self.places]
        return {"nbytes": self.nbytes, "places": rows}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BucketLayout:
        places = tuple(
            TensorPlace(name, getattr(torch, dtype), tuple(shape), start)
            for name, dtype, shape, start in value["places"]
        )
        return cls(places, value["nbytes"])


@dataclass(frozen=True, eq=False)
class WeightBucket:
    """Whole tensors under their Hugging Face names, in one buffer, uint8 ``[layout.nbytes]``.
    Iterating yields names and tensors, which are views of the buffer."""

    layout: BucketLayout
    content: Tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((place.name, place.view(self.content)) for place in self.layout.places)

    @classmethod
    def pack(cls, tensors: NamedTensors, alignment: int = ALIGNMENT) -> WeightBucket:
        """Copy tensors of one device, at least one, into a bucket."""
        named = list(tensors)
        layout = BucketLayout.plan([(n, t.dtype, t.shape) for n, t in named], alignment)
        content = torch.empty(layout.nbytes, dtype=torch.uint8, device=named[0][1].device)
        places = (place.view(content) for place in layout.places)
        copy_tensors(zip(places, (tensor for _, tensor in named), strict=True))
        return cls(layout, content)

    def by_dtype(self) -> Iterator[WeightBucket]:
        """One bucket per dtype, without gaps between tensors. A receiver that gets only names,
        dtypes and shapes computes the same layout from them."""
        groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in self:
            groups.setdefault(tensor.dtype, []).append((name, tensor))
        for named in groups.values():
            dense = BucketLayout.plan(((n, t.dtype, t.shape) for n, t in named), alignment=1)
            yield self if dense == self.layout else WeightBucket.pack(named, alignment=1)


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment
