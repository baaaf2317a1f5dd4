"""Ending generation once enough prompts are answered: the slow tail is aborted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import ServerLost

_POLL_S = 0.05


class StragglerAbort:
    """Counts answered prompts over all ranks; when there are enough, requests are to end.

    Args:
        wanted: prompts, with all their samples, that are enough; None: nothing ends early.
        n: samples of a prompt.
        name: of this count, the same on every rank and used once.
    """

    def __init__(self, wanted: int | None, n: int, name: str) -> None:
        self.wanted, self._n, self._name = wanted, n, f"mppo/answered/{name}"
        self._samples: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._store: Any = None
        if wanted is not None and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = distributed_c10d._get_default_store()
        self._here = 0
        self.reached = threading.Event()

    def answered(self, keys: Sequence[int]) -> None:
        """Count responses, given as ``prompt * n + sample``; any thread may call it."""
        if self.wanted is None:
            return
        with self._lock:
            self._samples.update(key // self._n for key in keys)
            complete = [p for p in {k // self._n for k in keys} if self._samples[p] == self._n]
            self._here += len(complete)
        self._look(len(complete))

    def end(self) -> None:
        """Nothing more is wanted of this rank's servers; any thread may call it."""
        self.reached.set()

    def _look(self, more: int) -> None:
        if self.wanted is None:
            return
        total = self._here if self._store is None else self._store.add(self._name, more)
        if total >= self.wanted:
            self.reached.set()

    @contextmanager
    def watching(self, apis: Callable[[], Mapping[int, SGLangApi]]) -> Iterator[None]:
        """Abort what still runs on this rank's servers from the moment on that enough is answered,
        or ``end`` is called.

        Args:
            apis: the servers that are up.
        """
        over = threading.Event()

        def watch() -> None:
            # again and again: a request may reach a server just after it was told to abort all
            while not over.wait(_POLL_S):
                self._look(0)
                for api in apis().values() if self.reached.is_set() else ():
                    try:
                        api.abort_all()
                    except ServerLost:
                        continue  # found and dealt with where its requests fail

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def forget(self) -> None:
        """Remove the shared count, once no rank looks any longer."""
        if self._store is not None and dist.get_rank() == 0:
            self._store.delete_key(self._name)
