"""Activation offloading: host memory holds activations between forward and backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from weakref import ref

import torch
from torch import Tensor

from mppo.parallel.host_copies import Fetched, HostCopier, HostCopy

SMALLEST = 1 << 10
"""Elements from which a tensor is moved; copying a smaller one costs more than it saves."""
AHEAD = 64 << 20
"""Bytes that are on the device before the backward pass needs them: about a millisecond of copying,
while the backward pass of a layer takes several."""


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd saved, at place ``number`` of the pass: on the device, in host memory,
    or on its way back. ``version`` is how often it had been changed in place before."""

    number: int
    tensor: Tensor | None
    version: int
    nbytes: int
    copy: HostCopy | None = None
    fetched: Fetched | None = None

    def move(self, copier: HostCopier) -> None:
        """Move it to host memory; RuntimeError if it was changed after autograd had saved it."""
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(self.tensor.shape)} that the backward pass needs was changed in "
                "place"
            )
        self.copy, self.tensor = copier.store(self.tensor), None

    def fetch(self, copier: HostCopier) -> None:
        """Start to bring it back, unless it is on the device or under way."""
        if self.tensor is None and self.fetched is None:
            assert self.copy is not None
            self.fetched = copier.fetch(self.copy)

    def take(self, copier: HostCopier) -> Tensor:
        """The tensor on the device; if it came back from host memory, it is the caller's alone."""
        if self.tensor is not None:
            return self.tensor
        self.fetch(copier)
        fetched, self.fetched = self.fetched, None
        assert fetched is not None
        return fetched.wait()


class _Pass:
    """The tensors that autograd saves in one forward pass, in their order. The last ``ahead`` bytes
    stay on the device, where the backward pass begins. While it uses them, the bytes before them
    are brought back, and so on. Autograd alone holds the tensors, and frees each after its use."""

    def __init__(self, copier: HostCopier, kept: set[int], ahead: int) -> None:
        self._copier, self._kept, self._ahead = copier, kept, ahead
        self._saved: list[ref[_Saved]] = []
        self._last: deque[tuple[int, ref[_Saved]]] = deque()
        self._last_bytes = 0

    def pack(self, x: Tensor) -> Tensor | _Saved:
        if x.numel() < SMALLEST or x.untyped_storage().data_ptr() in self._kept:
            return x
        saved = _Saved(len(self._saved), x.detach(), x._version, x.nbytes)
        self._saved.append(ref(saved))
        self._last.append((saved.nbytes, self._saved[-1]))
        self._last_bytes += saved.nbytes
        while self._last and self._last_bytes - self._last[0][0] >= self._ahead:
            nbytes, oldest = self._last.popleft()
            self._last_bytes -= nbytes
            moved = oldest()
            if moved is not None:
                moved.move(self._copier)
        return saved

    def unpack(self, kept: Tensor | _Saved) -> Tensor:
        """Return the tensor that ``pack`` was given, and bring back those saved before it."""
        if isinstance(kept, Tensor):
            return kept
        tensor, ahead = kept.take(self._copier), 0
        for number in range(kept.number - 1, -1, -1):
            if ahead >= self._ahead:
                break
            before = self._saved[number]()
            if before is not None:
                before.fetch(self._copier)
                ahead += before.nbytes
        return tensor


@contextmanager
def offloaded_activations(
    module: torch.nn.Module, copier: HostCopier, ahead: int | None = None
) -> Iterator[None]:
    """Move tensors that autograd saves in this context to host memory until the backward pass needs
    them; not the module's parameters and buffers. ``ahead`` bytes (None: ``AHEAD``) stay on the
    device, or are brought back early. On the CPU, which only tests use, these are plain copies."""
    kept = {x.untyped_storage().data_ptr() for x in chain(module.parameters(), module.buffers())}
    of_pass = _Pass(copier, kept, AHEAD if ahead is None else ahead)
    with torch.autograd.graph.saved_tensors_hooks(of_pass.pack, of_pass.unpack):
        yield
