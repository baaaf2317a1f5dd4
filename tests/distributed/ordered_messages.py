"""Messages between stages with NCCL's rules, on gloo.

A communicator per process group and pair of ranks executes its operations one after the other, in
the order in which they are issued, both directions together and without tags. A send ends when the
receiver has begun to receive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

LIMIT_S = 180
"""After this time a wait counts as a deadlock; a run without one does not come near it."""


class Work:
    """A message under way."""

    def __init__(self, what: str) -> None:
        self._what, self._error = what, None
        self._done = threading.Event()

    def carry_out(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except Exception as error:  # raised in the thread that waits
            self._error = error
        self._done.set()

    def wait(self) -> bool:
        if not self._done.wait(LIMIT_S):
            raise RuntimeError(f"deadlock: rank {dist.get_rank()} waits for {self._what}")
        if self._error is not None:
            raise self._error
        return True


class Communicators:
    """Takes the place of ``torch.distributed`` in ``mppo.pipeline.links``.

    Args:
        device_waits: all messages are awaited before every send, as if the pass before it had
            waited for the whole device, and before the buffer of a receive is allocated.
    """

    Work = dist.Work

    def __init__(self, device_waits: bool) -> None:
        self._device_waits = device_waits
        self._queues: dict[tuple[str, int], queue.SimpleQueue] = {}
        self._issued: list[Work] = []

    def isend(self, tensor, peer, group) -> Work:
        if self._device_waits:
            self.synchronize()
        return self._issue("a send to", dist.isend, tensor, peer, group)

    def irecv(self, tensor, peer, group) -> Work:
        return self._issue("a message of", dist.irecv, tensor, peer, group)

    @property
    def pairs(self) -> set[tuple[str, int]]:
        """Name of the group and the other rank of every communicator so far."""
        return set(self._queues)

    def synchronize(self) -> None:
        """Wait for all messages."""
        for work in self._issued:
            work.wait()
        self._issued.clear()

    def close(self) -> None:
        """End the threads, once all messages have arrived."""
        self.synchronize()
        for issued in self._queues.values():
            issued.put(None)

    def _issue(self, what: str, start: Callable, tensor, peer: int, group) -> Work:
        key = group.group_name, peer
        if key not in self._queues:
            self._queues[key] = queue.SimpleQueue()
            threading.Thread(target=_carry_out, args=(self._queues[key],), daemon=True).start()
        work = Work(f"{what} rank {peer} in {group.group_desc}")
        self._issued.append(work)
        self._queues[key].put((work, lambda: start(tensor, peer, group=group)))
        return work


def _carry_out(issued: queue.SimpleQueue) -> None:
    while (one := issued.get()) is not None:
        work, start = one
        work.carry_out(start)


@contextmanager
def ordered_messages(device_waits: bool) -> Iterator[Communicators]:
    """Let the lists of this process exchange messages with NCCL's rules in this context."""
    from mppo.models.role import Role
    from mppo.parallel import device
    from mppo.pipeline import links

    communicators = Communicators(device_waits)
    synchronize, links.dist = device.synchronize, communicators  # pyright: ignore
    device.synchronize = communicators.synchronize
    allocate = Role.message_buffer

    def wait_and_allocate(role, microbatch):
        communicators.synchronize()
        return allocate(role, microbatch)

    if device_waits:
        Role.message_buffer = wait_and_allocate
    try:
        yield communicators
        communicators.close()
    finally:
        links.dist, device.synchronize = dist, synchronize
        Role.message_buffer = allocate
