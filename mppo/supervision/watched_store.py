"""The heartbeat's key-value store, and a watch over the process that hosts it.

The first rank hosts the store. If that process is stopped or its node freezes, the connection stays
open and a call waits without limit: the timeout of ``TCPStore`` applies to connecting and to
waiting for a key, not to the answer to ``check`` or ``add``. The call holds the store's lock but
not the interpreter's, so a thread that never calls the store can measure how long the call waits.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from mppo.parallel.collectives import broadcast_object
from mppo.parallel.launch import LaunchInfo
from mppo.supervision.health import AwakeClock


class WatchedStore:
    """A ``TCPStore`` that the first rank hosts. Construct collectively, in the default process
    group. If a call waits longer than ``silence_s`` for its answer, ``on_silence`` is called once,
    in the watch's thread, with the seconds it has waited."""

    def __init__(
        self,
        info: LaunchInfo,
        interval_s: float,
        silence_s: float,
        on_silence: Callable[[float], None],
    ) -> None:
        self.clock = AwakeClock(interval_s)
        self._interval_s, self._silence_s, self._on_silence = interval_s, silence_s, on_silence
        self._call_began: dict[int, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="store watch", daemon=True).start()
        self._store = self._connect(info)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of ``TCPStore``; the watch measures how long each call waits."""
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            with self._calling():
                return method(*arguments)

        return call

    def close(self) -> None:
        self._closed.set()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._call_began[thread] = self.clock.now()
        try:
            yield
        finally:
            del self._call_began[thread]

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            now = self.clock.now()
            waited = now - min(list(self._call_began.values()), default=now)
            if waited > self._silence_s:
                self._on_silence(waited)
                return

    def _connect(self, info: LaunchInfo) -> TCPStore:
        """Connect to the store, which the first rank hosts on the rendezvous' interface."""
        port, listener = 0, None
        if info.rank == 0:
            listener = _listen(info.master_addr)
            port = listener.getsockname()[1]
        port = broadcast_object(port)
        with self._calling():
            store = TCPStore(
                info.master_addr,
                port,
                is_master=info.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=None if listener is None else listener.detach(),
            )
        return store


def _listen(address: str) -> socket.socket:
    """Listen on the interface of ``address``; on all interfaces if the address is not this host's.
    Behind network address translation the rendezvous address belongs to another machine."""
    for host in (address, ""):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
        except OSError:
            listener.close()
            continue
        listener.listen(socket.SOMAXCONN)
        return listener
    raise OSError(f"no free port on {address}")
