"""NumPy arrays of pinned host memory that tell when the host reads or writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

Touched = Callable[[list[Tensor], list[Tensor]], None]


class PinnedArray(np.ndarray):
    """An array that shares its memory with a tensor. Making it is no access; using it is.

    Attributes:
        tensor: the tensor.
        touched: called with the tensors that the host reads and those that it writes.
    """

    tensor: Tensor
    touched: Touched

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, PinnedArray):  # a view; a copy counts as one
            vars(self).update(vars(source))

    def _plain(self, writes: bool = False) -> np.ndarray:
        tensors = [self.tensor]
        self.touched(*(([], tensors) if writes else (tensors, [])))
        return self.view(np.ndarray)

    def __getitem__(self, key: Any) -> Any:
        self._plain()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._plain(writes=True)[key] = value

    def __iter__(self) -> Any:
        return iter(self._plain())

    def tolist(self) -> Any:
        return self._plain().tolist()

    def item(self, *place: Any) -> Any:
        return self._plain().item(*place)

    def tobytes(self, *order: Any) -> bytes:
        return self._plain().tobytes(*order)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Arithmetic and sums: the results are ordinary arrays."""
        if "out" in options:
            options["out"] = tuple(_plain(x, True) for x in options["out"])
        return getattr(ufunc, method)(*(_plain(x, False) for x in inputs), **options)


def pinned_array(array: np.ndarray, tensor: Tensor, touched: Touched) -> PinnedArray:
    """Let an array of a pinned tensor tell ``touched`` when it is used."""
    found = array.view(PinnedArray)
    found.tensor, found.touched = tensor, touched
    return found


def _plain(x: Any, writes: bool) -> Any:
    return x._plain(writes) if isinstance(x, PinnedArray) else x
