"""Messages between neighbouring pipeline stages, of known sizes; nothing waits for a send.

Each direction is a communicator of its own, on which one neighbour only sends and the other only
receives, in the same order: what ``mppo.pipeline.checks`` shows of the lists.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups

_FORWARD, _BACK = 1, 2
"""Tags, where both directions are one communicator."""


@dataclass(frozen=True)
class Arriving:
    """A message that is awaited."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The message, once it is there."""
        assert self.work is not None, "this rank is not in the pipeline"
        self.work.wait()
        return self.tensor


class Links:
    """This rank's links to the stages before and after its own.

    Args:
        groups: of a role; all roles in a schedule have the same neighbours.
    """

    def __init__(self, groups: LayoutGroups) -> None:
        self.stages, self.stage = groups.layout.pp, groups.coordinates.pp
        self._forward = groups.pp
        self._back = groups.pp_back
        apart = groups.layout.world // groups.layout.pp
        self._before, self._after = groups.rank - apart, groups.rank + apart
        self._connect()
        self._outputs: deque[Arriving] = deque()
        self._gradients: deque[Arriving] = deque()

    def _connect(self) -> None:
        """Exchange a number with each neighbour, each way.

        The first message of two ranks makes their connection, and that may wait for both ranks. A
        list may begin to receive before it computes what the sender waits for.
        """
        first, last = self.stage == 0, self.stage == self.stages - 1
        number = torch.zeros(1, device=device.device())
        arriving = [] if first else [self.receive_input(torch.empty_like(number))]
        sent = [] if last else [dist.isend(number, self._after, self._forward, tag=_FORWARD)]
        arriving += [] if last else [self.receive_gradient(torch.empty_like(number))]
        sent += [] if first else [dist.isend(number, self._before, self._back, tag=_BACK)]
        for message in arriving:
            message.wait()
        for work in sent:
            assert work is not None
            work.wait()

    def receive_input(self, room: Tensor) -> Arriving:
        """Await a message from the stage before, in ``room``."""
        work = dist.irecv(room, self._before, group=self._forward, tag=_FORWARD)
        return Arriving(room, work)

    def receive_gradient(self, room: Tensor) -> Arriving:
        """Await a message from the stage after, in ``room``."""
        work = dist.irecv(room, self._after, group=self._back, tag=_BACK)
        return Arriving(room, work)

    def send_output(self, message: Tensor) -> None:
        """Send to the stage after."""
        work = dist.isend(message, self._after, group=self._forward, tag=_FORWARD)
        self._outputs.append(Arriving(message, work))
        self._release(self._outputs, self.stages - self.stage)

    def send_gradient(self, message: Tensor) -> None:
        """Send to the stage before."""
        work = dist.isend(message, self._before, group=self._back, tag=_BACK)
        self._gradients.append(Arriving(message, work))
        self._release(self._gradients, self.stages - self.stage + 1)

    def finish(self) -> None:
        """Wait until everything that was sent has been received."""
        self._release(self._outputs, 0)
        self._release(self._gradients, 0)

    @staticmethod
    def _release(sent: deque[Arriving], kept: int) -> None:
        """Let go of all but the last messages, which may not have been received yet.

        A stage holds at most ``stages - stage`` micro-batches, the stage before it one more. So
        when it sends another one's output, the gradient of the oldest kept has come back; and when
        it sends another gradient, the stage before has needed the oldest kept to go on.
        """
        while len(sent) > kept:
            sent.popleft().wait()
