"""The training program, whose rank 1 kills itself in the middle of a copy of an offloaded part."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from mppo.parallel import moved_storages
from mppo.parallel.moved_storages import CopyLane
from mppo.supervision.phase import current
from mppo.train import main as train

PHASE = "update_weights, step 2"
"""What has been trained leaves for host memory."""


class DyingLane(CopyLane):
    """Copies like a ``CopyLane``, until rank 1 has made half of the copies of a call."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]):
        """Start to copy tensors of equal size."""
        return super().copy(_until_death(list(pairs)))


def _until_death(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for number, pair in enumerate(pairs):
        if os.environ["RANK"] == "1" and PHASE in current() and 0 < len(pairs) // 2 == number:
            print(f"killed after {number} of {len(pairs)} copies", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


def main(argv: Sequence[str]) -> int:
    """``mppo-train``."""
    moved_storages.CopyLane = DyingLane
    return train(argv)
