"""Abort the slowest requests once enough prompts are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mppo.rollout.answered import AnsweredPrompts
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import ServerLost

_POLL_S = 0.05


class StragglerAbort:
    """Aborts running requests once enough prompts are answered and somebody waits for them;
    ``reached`` is set then."""

    def __init__(self, answered: AnsweredPrompts) -> None:
        self.answered = answered
        self._is_awaited = threading.Event()
        self.reached = threading.Event()

    def when_enough(self) -> None:
        """Abort as soon as enough prompts are answered; until now none was waited for."""
        self._is_awaited.set()
        self._look()

    def abort(self) -> None:
        """Abort this rank's running requests; safe in any thread."""
        self.reached.set()

    def _look(self) -> None:
        if self._is_awaited.is_set() and self.answered.are_enough:
            self.reached.set()

    @contextmanager
    def watching(self, apis: Callable[[], Mapping[int, SGLangApi]]) -> Iterator[None]:
        """Abort running requests of this rank's servers, those not lost, as soon as ``reached`` is
        set."""
        over = threading.Event()

        def watch() -> None:
            # repeatedly: a request may reach a server just after the server aborted all others
            while not over.wait(_POLL_S):
                self._look()  # other ranks may have completed prompts
                for api in apis().values() if self.reached.is_set() else ():
                    try:
                        api.abort_all()
                    except ServerLost:
                        continue  # the request to that server fails too, and is handled there

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
