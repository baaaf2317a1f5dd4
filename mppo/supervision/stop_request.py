"""Interrupting a PPO step after a stop request that the step would outlast.

A rank that gets SIGTERM or Ctrl-C calls ``request``; the heartbeat informs the other ranks. Code
that waits for no other rank calls ``raise_if_due``. ``sync`` is collective: there all ranks
interrupt the step together, so that they can save together. The step's results are discarded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mppo.parallel.collectives import largest_of_ranks
from mppo.parallel.launch import PATIENCE_S

_REPORT_BEFORE_KILL_S = 2.0
"""Seconds before SIGKILL at which the process reports the phase it is in."""


class StepInterrupted(Exception):
    """All ranks interrupt the PPO step.

    Args:
        half_done: whether optimizers have already taken some of the step's updates.
    """

    def __init__(self, half_done: bool = False) -> None:
        self.half_done = half_done
        super().__init__("the PPO step was interrupted by a stop request")


@dataclass
class _Stop:
    """State of the request; times are in seconds of the monotonic clock."""

    requested_at: float | None = None
    within_s: float = math.inf
    patience_s: float = PATIENCE_S
    expected_end: float = 0.0
    over: bool = False
    on_request: Callable[[], None] | None = None

    @property
    def limit_s(self) -> float:
        """Seconds after a request within which the run can stop by itself."""
        return max(self.patience_s - _REPORT_BEFORE_KILL_S, self.within_s)


_stop = _Stop()


def request() -> None:
    """Request that the run stop soon; callable from any thread."""
    if _stop.requested_at is None:
        _stop.requested_at = time.monotonic()
        if _stop.on_request is not None:
            _stop.on_request()


def on_request(callback: Callable[[], None] | None) -> None:
    """Register the function that the first request calls, in any thread; None: no function."""
    _stop.on_request = callback


def patience_s() -> float:
    """Seconds after a request until the launcher kills the process."""
    return _stop.patience_s


def is_requested() -> bool:
    """Whether this rank has received a request."""
    return _stop.requested_at is not None


def reset(within_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
    """Clear a request, and set the limits for the next one.

    Args:
        within_s: seconds after a request within which the step may still end; None: no limit.
        patience_s: seconds after a request until the launcher kills this process.
    """
    global _stop
    _stop = _Stop(within_s=math.inf if within_s is None else within_s, patience_s=patience_s)


def over() -> None:
    """Mark training and its saves as done: ``overdue`` is False from here on."""
    _stop.over = True


def expect(seconds: float) -> None:
    """Set the expected duration of the step that begins now and a save after it."""
    _stop.expected_end = time.monotonic() + seconds


def due() -> bool:
    """Whether this rank would interrupt the step; once true, it stays true until the step ends."""
    if _stop.requested_at is None:
        return False
    return max(_stop.expected_end, time.monotonic()) > _stop.requested_at + _stop.within_s


def overdue() -> bool:
    """Whether the launcher is about to kill this process while training is not done."""
    if _stop.requested_at is None or _stop.over or math.isinf(_stop.within_s):
        return False
    return time.monotonic() - _stop.requested_at > _stop.limit_s


def raise_if_due() -> None:
    """Raise if this rank should stop. All ranks must then reach a ``sync``.

    Raises:
        StepInterrupted: the step would outlast the limit.
    """
    if due():
        raise StepInterrupted


def sync() -> None:
    """Interrupt the step on every rank if any rank should stop. Collective.

    Raises:
        StepInterrupted: on every rank.
    """
    _raise_if_any(due())


def sync_between_updates(done: int, of: int, began: float) -> None:
    """Interrupt the step between updates, only if the rest cannot end in time. Collective.

    Args:
        done, of: number of updates taken and of all updates.
        began: when the first update began (monotonic clock, s).

    Raises:
        StepInterrupted: on every rank.
    """
    _raise_if_any(late_between_updates(done, of, began), half_done=True)


def late_between_updates(done: int, of: int, began: float) -> bool:
    """Whether the rest of the updates would end too late; see ``sync_between_updates``."""
    if _stop.requested_at is None:
        return False
    now = time.monotonic()
    return now + (of - done) * (now - began) / done > _stop.requested_at + _stop.limit_s


def _raise_if_any(here: bool, half_done: bool = False) -> None:
    """Raise ``StepInterrupted`` on every rank if ``here`` is true on any. Collective."""
    if any(largest_of_ranks([here])):
        raise StepInterrupted(half_done)
