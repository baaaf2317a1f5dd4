"""Non-blocking messages of known sizes between neighbouring pipeline stages.

Each direction has a communicator of its own, on which one neighbour only sends and the other only
receives. Both do so in the same order; ``mppo.pipeline.checks`` checks this for every schedule.
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
"""Message tags, which matter where both directions share a communicator."""


@dataclass(frozen=True)
class Arriving:
    """A message whose non-blocking send or receive has started.

    Args:
        tensor: the message.
        work: handle of the send or receive; None on a rank outside the process group.
    """

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Wait until the operation has completed and return the message."""
        assert self.work is not None, "this rank is not in the pipeline"
        self.work.wait()
        return self.tensor


class Links:
    """This rank's connections to the previous and the next pipeline stage.

    Args:
        groups: process groups of any role in the schedule; this rank has the same neighbours in
            all of them.
    """

    def __init__(self, groups: LayoutGroups) -> None:
        self.stages, self.stage = groups.layout.pp, groups.coordinates.pp
        self._forward = groups.pp
        self._back = groups.pp_back
        stride = groups.layout.world // groups.layout.pp
        self._before, self._after = groups.rank - stride, groups.rank + stride
        self._connect()
        self._outputs: deque[Arriving] = deque()
        self._gradients: deque[Arriving] = deque()

    def _connect(self) -> None:
        """Exchange one number with each neighbour in each direction.

        The first message between two ranks creates their connection, which may block until both
        ranks call it. A list may post a receive before the pass whose result the sender needs; if
        that receive were the first message and blocked, the two ranks would deadlock.
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

    def receive_input(self, buffer: Tensor) -> Arriving:
        """Start to receive a message from the previous stage into ``buffer``."""
        work = dist.irecv(buffer, self._before, group=self._forward, tag=_FORWARD)
        return Arriving(buffer, work)

    def receive_gradient(self, buffer: Tensor) -> Arriving:
        """Start to receive a message from the next stage into ``buffer``."""
        work = dist.irecv(buffer, self._after, group=self._back, tag=_BACK)
        return Arriving(buffer, work)

    def send_output(self, message: Tensor) -> None:
        """Start to send a message to the next stage."""
        work = dist.isend(message, self._after, group=self._forward, tag=_FORWARD)
        self._outputs.append(Arriving(message, work))
        self._release(self._outputs, self.stages - self.stage)

    def send_gradient(self, message: Tensor) -> None:
        """Start to send a message to the previous stage."""
        work = dist.isend(message, self._before, group=self._back, tag=_BACK)
        self._gradients.append(Arriving(message, work))
        self._release(self._gradients, self.stages - self.stage + 1)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        self._release(self._outputs, 0)
        self._release(self._gradients, 0)

    @staticmethod
    def _release(sent: deque[Arriving], kept: int) -> None:
        """Wait for all but the last ``kept`` sends and free their messages.

        These waits do not block, for the following reason. A stage holds at most ``stages - stage``
        micro-batches, the previous stage one more. When this stage sends a further output, the
        gradient of the oldest micro-batch has already come back, so its output has been received.
        When it sends a further gradient, the previous stage must have consumed the oldest one to
        have room for the micro-batch that this gradient belongs to.
        """
        while len(sent) > kept:
            sent.popleft().wait()
