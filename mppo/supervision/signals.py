"""SIGUSR1, SIGTERM and SIGINT ask the run to stop; asked twice, the process exits at once.

After SIGUSR1 there is time to finish the step; after the others it may be abandoned
(``mppo.supervision.stop_request``).

SIGUSR1 again means nothing new: on preemption Slurm tells the batch script and the ranks, and the
script tells the ranks as well.

Python runs signal handlers in the main thread between bytecodes, which may be never while a
collective waits. The C-level handler, though, writes to a wake-up descriptor immediately; a thread
reads it, so that the second signal always ends the process.
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

from mppo.supervision import stop_request

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0


class StopRequest:
    """Whether someone asked the run to stop, and how."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._urgent = False

    def receive(self, number: int) -> None:
        """Take note of a signal; exit if it is the second request.

        Launchers pass a terminal's Ctrl-C on to processes that the terminal has already told: what
        comes within a second of the first is the same request.
        """
        now = time.monotonic()
        urgent = number != signal.SIGUSR1
        if self.signal_name is None or (urgent and not self._urgent):
            self.signal_name, self._first_at = signal.Signals(number).name, now
            self._urgent = urgent
            if urgent:
                stop_request.request()
        elif urgent and now - self._first_at > _SAME_REQUEST_S:
            sys.stderr.write(f"mppo: {signal.Signals(number).name} again: exiting at once\n")
            sys.stderr.flush()
            os._exit(128 + number)


@contextmanager
def listening(
    within_s: float | None = None, patience_s: float = stop_request.PATIENCE_S
) -> Iterator[StopRequest]:
    """Take stop signals inside; what was installed before is put back on leaving.

    Call from the main thread.

    Args:
        within_s: ``trainer.stop_within_s``.
        patience_s: seconds until the launcher kills a process it has told to stop.
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
