"""Non-blocking messages of known sizes between neighbouring pipeline stages.

With interleaving, the last and the first stage are neighbours as well. Each direction between two
neighbours has a communicator of its own, on which one of them only sends and the other only
receives. Both do so in the same order; ``mppo.pipeline.checks`` checks this for every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.pipeline.actions import RoleWork

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

    With interleaving, the last stage precedes the first one.

    Args:
        groups_of_roles: process groups of every role in the schedule; this rank has the same
            neighbours in all of them.
    """

    def __init__(self, groups_of_roles: Iterable[LayoutGroups]) -> None:
        groups = max(groups_of_roles, key=lambda groups: groups.layout.vpp)
        layout, self._has_wrap = groups.layout, groups.layout.vpp > 1
        self.stages, self.stage = layout.pp, groups.coordinates.pp
        stride = layout.world // layout.pp
        self._before = (groups.rank - stride) % layout.world
        self._after = (groups.rank + stride) % layout.world
        self._first, self._last = self.stage == 0, self.stage == self.stages - 1
        self._from_before = groups.pp_wrap if self._first else groups.pp
        self._to_after = groups.pp_wrap if self._last else groups.pp
        self._from_after = groups.pp_wrap_back if self._last else groups.pp_back
        self._to_before = groups.pp_wrap_back if self._first else groups.pp_back
        work = RoleWork("", (), chunks=layout.vpp)
        self._kept_outputs = work.most_in_flight(self.stage, self.stages)
        self._kept_gradients = self.stages
        if not self._first:
            self._kept_gradients = work.most_in_flight(self.stage - 1, self.stages)
        self._outputs: deque[Arriving] = deque()
        self._gradients: deque[Arriving] = deque()
        self._connect()

    def _connect(self) -> None:
        """Exchange one number with each neighbour in each direction.

        The first message between two ranks creates their connection, which may block until both
        ranks call it. A list may post a receive before the pass whose result the sender needs; if
        that receive were the first message and blocked, the two ranks would deadlock.
        """
        number = torch.zeros(1, device=device.device())
        arriving = []
        for wraps in (False, True) if self._has_wrap else (False,):
            if self._first == wraps:
                arriving.append(self.receive_input(torch.empty_like(number)))
            if self._last == wraps:
                self.send_output(number)
                arriving.append(self.receive_gradient(torch.empty_like(number)))
            if self._first == wraps:
                self.send_gradient(number)
        for message in arriving:
            message.wait()
        self.finish()

    def receive_input(self, buffer: Tensor) -> Arriving:
        """Start to receive a message from the previous stage into ``buffer``."""
        work = dist.irecv(buffer, self._before, group=self._from_before, tag=_FORWARD)
        return Arriving(buffer, work)

    def receive_gradient(self, buffer: Tensor) -> Arriving:
        """Start to receive a message from the next stage into ``buffer``."""
        work = dist.irecv(buffer, self._after, group=self._from_after, tag=_BACK)
        return Arriving(buffer, work)

    def send_output(self, message: Tensor) -> None:
        """Start to send a message to the next stage."""
        work = dist.isend(message, self._after, group=self._to_after, tag=_FORWARD)
        self._outputs.append(Arriving(message, work))
        self._release(self._outputs, self._kept_outputs)

    def send_gradient(self, message: Tensor) -> None:
        """Start to send a message to the previous stage."""
        work = dist.isend(message, self._before, group=self._to_before, tag=_BACK)
        self._gradients.append(Arriving(message, work))
        self._release(self._gradients, self._kept_gradients)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        self._release(self._outputs, 0)
        self._release(self._gradients, 0)

    @staticmethod
    def _release(sent: deque[Arriving], kept: int) -> None:
        """Wait for all but the last ``kept`` sends and free their messages.

        These waits do not block, for the following reason. When a stage has computed ``b`` backward
        passes, the next stage has received at least its first ``b`` outputs, because the order of
        the backward passes is never ahead of that of the forward passes. The stage has then
        computed at most ``b + most_in_flight`` forward passes. The same holds on the previous
        stage, which has therefore consumed all but the last ``most_in_flight`` gradients. The last
        stage consumes a gradient from the first stage when it computes the backward passes of the
        previous chunk, as many passes later as there are stages.
        """
        while len(sent) > kept:
            sent.popleft().wait()
