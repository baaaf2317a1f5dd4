"""SIGUSR1, SIGTERM and SIGINT request a stop; a second SIGTERM or SIGINT exits at once.

After SIGUSR1 the step is finished; after the others it may be interrupted
(``mppo.supervision.stop_request``).

A second SIGUSR1 is ignored: on preemption Slurm signals both the batch script and the ranks, and
the script forwards the signal to the ranks.

Python runs signal handlers in the main thread between bytecodes, which may never happen while a
collective waits. The C-level handler writes to a wake-up descriptor immediately, and a thread reads
it, so the second signal always ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mppo.supervision import stop_request

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0
"""Signals within this time of the first one belong to the same request."""


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

        Args:
            number: of the signal.
        """
        now = time.monotonic()
        urgent = number != signal.SIGUSR1
        if self.signal_name is None or (urgent and not self._urgent):
            self.signal_name, self._first_at = signal.Signals(number).name, now
            self._urgent = urgent
            if urgent:
                stop_request.request()
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
    within_s: float | None = None, patience_s: float = stop_request.PATIENCE_S
) -> Iterator[StopRequest]:
    """Handle stop signals inside; restore the earlier handlers on leaving.

    Call from the main thread.

    Args:
        within_s: ``trainer.stop_within_s``.
        patience_s: seconds from the launcher's signal until it kills the process.
    """
    request = StopRequest()
    stop_request.reset(within_s, patience_s)
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    request.receive(number)

    threading.Thread(target=listen, name="stop signals", daemon=True).start()
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        stop_request.reset()
        writer.close()
