"""Stop requests: the signals that make them, and interrupting a PPO step that would outlast one.

SIGUSR1, SIGTERM and SIGINT request a stop; a second SIGTERM or SIGINT exits at once. After SIGUSR1
the step is finished. After the others the heartbeat informs the other ranks, and the step may be
interrupted: code that waits for no other rank calls ``raise_if_due``. ``sync`` is collective: there
all ranks interrupt the step together, so that they can save together. The step's results are
discarded.

A second SIGUSR1 is ignored: on preemption Slurm signals both the batch script and the ranks, and
the script forwards the signal to the ranks.

Python runs signal handlers in the main thread between bytecodes, which may never happen while a
collective waits. The C-level handler writes to a wake-up descriptor immediately, and a thread reads
it, so the second signal always ends the process.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from mppo.parallel.collectives import largest_of_ranks
from mppo.parallel.launch import PATIENCE_S

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0
"""Signals within this time of the first one belong to the same request."""
_REPORT_BEFORE_KILL_S = 2.0
"""Seconds before SIGKILL at which the process reports the phase it is in."""


class StepInterrupted(Exception):
    """All ranks interrupt the PPO step; ``half_done``: it has already taken some updates."""

    def __init__(self, half_done: bool = False) -> None:
        self.half_done = half_done
        super().__init__("the PPO step was interrupted by a stop request")


@dataclass
class _Stop:
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
    return _stop.patience_s


def is_requested() -> bool:
    return _stop.requested_at is not None


def reset(within_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
    """Clear a request, and set for the next one the seconds within which the step may still end
    (None: no limit), and those until the launcher kills this process."""
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
    """Raise StepInterrupted if the step would outlast the limit; all ranks must then ``sync``."""
    if due():
        raise StepInterrupted


def sync() -> None:
    """Raise StepInterrupted on every rank if any rank should stop. Collective."""
    _raise_if_any(due())


def sync_between_updates(done: int, of: int, began: float) -> None:
    """Raise StepInterrupted on every rank between updates, only if the rest cannot end in time;
    ``began`` is when the first update began (monotonic clock, s). Collective."""
    _raise_if_any(late_between_updates(done, of, began), half_done=True)


def late_between_updates(done: int, of: int, began: float) -> bool:
    """Whether the rest of the updates would end too late; see ``sync_between_updates``."""
    if _stop.requested_at is None:
        return False
    now = time.monotonic()
    return now + (of - done) * (now - began) / done > _stop.requested_at + _stop.limit_s


def _raise_if_any(here: bool, half_done: bool = False) -> None:
    if any(largest_of_ranks([here])):
        raise StepInterrupted(half_done)


class StopRequest:
    """A request to stop the run, and the signal that made it (None: no request)."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._urgent = False

    def receive(self, number: int) -> None:
        """Record a signal; exit if it is the second request.

        Launchers forward a terminal's Ctrl-C to processes that the terminal has already signalled:
        a signal within a second of the first is the same request.
        """
        now = time.monotonic()
        urgent = number != signal.SIGUSR1
        if self.signal_name is None or (urgent and not self._urgent):
            self.signal_name, self._first_at = signal.Signals(number).name, now
            self._urgent = urgent
            if urgent:
                request()
        elif urgent and now - self._first_at > _SAME_REQUEST_S:
            _exit(number, "again")

    def exit_at_once(self) -> None:
        """End this process because of the signal received: nothing is worth saving yet."""
        assert self.signal_name is not None, "no request"
        _exit(signal.Signals[self.signal_name], "while the ranks start")


def _exit(number: int, when: str) -> NoReturn:
    sys.stderr.write(f"mppo: {signal.Signals(number).name} {when}: exiting at once\n")
    sys.stderr.flush()
    os._exit(128 + number)


@contextmanager
def listening(
    within_s: float | None = None, patience_s: float = PATIENCE_S
) -> Iterator[StopRequest]:
    """Handle stop signals inside; restore the earlier handlers on leaving. Call from the main
    thread. Limits are those of ``reset``."""
    stop = StopRequest()
    reset(within_s, patience_s)
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    stop.receive(number)

    threading.Thread(target=listen, name="stop signals", daemon=True).start()
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        reset()
        writer.close()
