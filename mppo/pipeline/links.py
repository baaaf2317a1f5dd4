"""Non-blocking messages of known sizes between neighbouring pipeline stages.

With interleaving, the last and the first stage are neighbours as well. Each direction has a process
group (``routes``). torch makes a communicator in it for each pair of neighbours, on which one of
them only sends and the other only receives, as long as the group is not bound to a device. Both do
so in the same order; ``mppo.pipeline.schedule_checks`` checks this for every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.pipeline.routes import MessageKind, kept_sends, route


@dataclass(frozen=True)
class Arriving:
    """A message whose non-blocking send or receive has started; no ``work`` outside its group."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Wait until the operation has completed and return the message."""
        assert self.work is not None, "this rank is not in the pipeline"
        self.work.wait()
        return self.tensor


class Links:
    """This rank's connections to the previous and the next pipeline stage. With interleaving, the
    last stage precedes the first one. All roles' groups give this rank the same neighbours."""

    def __init__(self, groups_of_roles: Iterable[LayoutGroups]) -> None:
        groups = max(groups_of_roles, key=lambda groups: groups.layout.vpp)
        layout, self._has_wrap = groups.layout, groups.layout.vpp > 1
        self.stages, self.stage = layout.pp, groups.coordinates.pp
        self._groups, self._stride = groups, layout.world // layout.pp
        self._first, self._last = self.stage == 0, self.stage == self.stages - 1
        self._kept_outputs, self._kept_gradients = kept_sends(self.stage, self.stages, layout.vpp)
        self._outputs: deque[Arriving] = deque()
        self._gradients: deque[Arriving] = deque()
        self._connect()

    def _connect(self) -> None:
        """Exchange one number with each neighbour in each direction. The first message between two
        ranks creates their connection, which may block until both call it. If the first message of
        a list blocked there, a neighbour could meanwhile wait for another message of this rank."""
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
        return Arriving(buffer, self._start(dist.irecv, buffer, "receive_input"))

    def receive_gradient(self, buffer: Tensor) -> Arriving:
        """Start to receive a message from the next stage into ``buffer``."""
        return Arriving(buffer, self._start(dist.irecv, buffer, "receive_gradient"))

    def send_output(self, message: Tensor) -> None:
        """Start to send a message to the next stage."""
        self._outputs.append(Arriving(message, self._start(dist.isend, message, "send_output")))
        self._release(self._outputs, self._kept_outputs)

    def send_gradient(self, message: Tensor) -> None:
        """Start to send a message to the previous stage."""
        work = self._start(dist.isend, message, "send_gradient")
        self._gradients.append(Arriving(message, work))
        self._release(self._gradients, self._kept_gradients)

    def _start(
        self, start: Callable[..., dist.Work | None], message: Tensor, kind: MessageKind
    ) -> dist.Work | None:
        group, peer = route(kind, self.stage, self.stages)
        rank = self._groups.rank + (peer - self.stage) * self._stride
        return start(message, rank, group=getattr(self._groups, group))

    def finish(self) -> None:
        self._release(self._outputs, 0)
        self._release(self._gradients, 0)

    @staticmethod
    def _release(sent: deque[Arriving], kept: int) -> None:
        """Wait for all but the last ``kept`` sends and free their messages (``kept_sends``)."""
        while len(sent) > kept:
            sent.popleft().wait()
