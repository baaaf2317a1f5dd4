"""Leaving a PPO step unfinished because the run is asked to stop and the step would take too long.

A rank that gets SIGTERM or Ctrl-C calls ``request``; the heartbeat informs the other ranks. Phases
that wait for no other rank call ``raise_if_due``. Where all ranks pass, ``sync`` makes them leave
at one place, so that they can save together. What each rank was computing is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mppo.parallel import device
from mppo.parallel.launch import PATIENCE_S

_LAST_WORDS_S = 2.0
"""So long before it, the process says where it was."""


class StepInterrupted(Exception):
    """All ranks leave the step.

    Args:
        half_done: optimizers have already taken some of the step's updates.
    """

    def __init__(self, half_done: bool = False) -> None:
        self.half_done = half_done
        super().__init__("the PPO step was abandoned: the run is asked to stop")


@dataclass
class _Stop:
    """Times are of the monotonic clock, in seconds."""

    asked_at: float | None = None
    within_s: float = math.inf
    patience_s: float = PATIENCE_S
    expected_end: float = 0.0
    over: bool = False
    on_ask: Callable[[], None] | None = None

    @property
    def limit_s(self) -> float:
        """Seconds after a request in which the run can stop by itself."""
        return max(self.patience_s - _LAST_WORDS_S, self.within_s)


_stop = _Stop()


def request() -> None:
    """The run is to stop soon; callable from any thread."""
    if _stop.asked_at is None:
        _stop.asked_at = time.monotonic()
        if _stop.on_ask is not None:
            _stop.on_ask()


def on_ask(tell: Callable[[], None]) -> None:
    """Have something called, in any thread, as soon as the run is asked to stop soon."""
    _stop.on_ask = tell


def patience_s() -> float:
    """Seconds after a request until the launcher kills the process."""
    return _stop.patience_s


def is_requested() -> bool:
    """Whether this rank knows of such a request."""
    return _stop.asked_at is not None


def reset(within_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
    """Forget a request.

    Args:
        within_s: seconds in which a step may still end after a request; None: any time.
        patience_s: seconds after a request until the launcher kills this process.
    """
    global _stop
    _stop = _Stop(within_s=math.inf if within_s is None else within_s, patience_s=patience_s)


def over() -> None:
    """Training has ended, and what it had to save is saved: nothing is late any more."""
    _stop.over = True


def expect(seconds: float) -> None:
    """The step that begins now, and a save, will take about so long."""
    _stop.expected_end = time.monotonic() + seconds


def due() -> bool:
    """Whether this rank would leave the step; once true it stays so until the step ends."""
    if _stop.asked_at is None:
        return False
    return max(_stop.expected_end, time.monotonic()) > _stop.asked_at + _stop.within_s


def overdue() -> bool:
    """Whether the launcher is about to kill this process while it trains."""
    if _stop.asked_at is None or _stop.over or math.isinf(_stop.within_s):
        return False
    return time.monotonic() - _stop.asked_at > _stop.limit_s


def raise_if_due() -> None:
    """Leave what this rank does alone. A ``sync`` on the way that all ranks take must follow.

    Raises:
        StepInterrupted: if the step is not to be finished.
    """
    if due():
        raise StepInterrupted


def sync() -> None:
    """Leave the step if any rank would. Collective.

    Raises:
        StepInterrupted: on every rank.
    """
    _together(due())


def sync_between_updates(done: int, of: int, began: float) -> None:
    """Between updates: leave only where the others cannot be done in time. Collective.

    Args:
        done, of: updates taken and to take.
        began: when the first began.

    Raises:
        StepInterrupted: on every rank.
    """
    now = time.monotonic()
    late = False
    if _stop.asked_at is not None:
        limit = _stop.asked_at + _stop.limit_s
        late = now + (of - done) * (now - began) / done > limit
    _together(late, half_done=True)


def _together(here: bool, half_done: bool = False) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        flag = torch.tensor(float(here), device=device.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        here = bool(flag)
    if here:
        raise StepInterrupted(half_done)
