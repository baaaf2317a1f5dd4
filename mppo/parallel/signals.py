"""SIGUSR1, SIGTERM and SIGINT ask the run to stop; asked twice, the process exits at once.

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

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_S = 1.0


class StopRequest:
    """Whether someone asked the run to stop, and how."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0

    def receive(self, number: int) -> None:
        """Take note of a signal; exit if it is the second request.

        Launchers pass a terminal's Ctrl-C on to processes that the terminal has already told: what
        comes within a second of the first is the same request.
        """
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self._first_at = signal.Signals(number).name, now
        elif number != signal.SIGUSR1 and now - self._first_at > _SAME_REQUEST_S:
            sys.stderr.write(f"mppo: {signal.Signals(number).name} again: exiting at once\n")
            sys.stderr.flush()
            os._exit(128 + number)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Take stop signals inside; what was installed before is put back on leaving.

    Call from the main thread.
    """
    request = StopRequest()
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
        writer.close()
